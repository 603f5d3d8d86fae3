"""Parameters and gradients that are divided over devices."""
