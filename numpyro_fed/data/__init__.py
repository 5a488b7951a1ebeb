"""What silos hold: arrays and tables, their columns' scales, padding."""
