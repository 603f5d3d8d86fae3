"""Numbers, conditions and sizes of `forward` that depend on the values of tensors.

known_values    tensors computed from constants
questions       values that forward reads, answered as for the example
outside         times and arrays of NumPy
numbers         Python numbers that depend on tensors
symbolic        arithmetic on such numbers
extremes        their maxima and minima
branches        two paths of forward as one graph
finite          checks for finite numbers
row_selections  numbers of rows that depend on values
counted         rows of which one number is needed
unique          `torch.unique` as such rows
bincount        histograms with a fixed number of bins
"""
