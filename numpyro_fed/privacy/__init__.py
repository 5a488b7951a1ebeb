"""What protects rows from those who see the messages."""
