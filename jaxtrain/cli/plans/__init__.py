"""What `jaxtrain plan` prints of devices that are not here, and its tables."""
