"""Triton kernels; each has a PyTorch implementation that gives the same results to rounding."""
