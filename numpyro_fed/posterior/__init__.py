"""What a fit is asked: draws, verdict, predictions, pictures, tables, files."""
