"""The verdict on two runs: the reference and its noise, the comparison in float64 and in lower precisions."""
