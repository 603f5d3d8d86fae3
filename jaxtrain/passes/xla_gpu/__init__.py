"""Forms of a program that XLA compiles better for GPUs."""
