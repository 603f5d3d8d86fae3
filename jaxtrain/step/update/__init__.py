"""The update of the parameters, once a window has its gradient: clipping, the optimizer, rounding, the average."""
