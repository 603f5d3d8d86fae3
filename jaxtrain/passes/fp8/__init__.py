"""Products in 8 bits."""
