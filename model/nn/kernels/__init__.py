"""Triton kernels: attention, norm (with the residual sum), rotary, dropout, cross_entropy, decode_attention and the
adamw update.

Each kernel has a PyTorch implementation that gives the same results to rounding; it runs where there is no GPU.
"""
