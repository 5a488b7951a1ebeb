"""What comes after a fit: prediction, silos left out, and further questions to a posterior."""
