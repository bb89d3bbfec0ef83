"""Triton kernels: attention, norm (with the residual sum), cross_entropy and the adamw update.

Each has a plain implementation in torch that gives the same numbers to rounding and runs where there is no GPU.
"""
