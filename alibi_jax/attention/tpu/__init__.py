"""Attention with linear biases as Pallas kernels for TPUs."""
