"""Triton kernels: attention, norm (with the residual sum), rotary, dropout, cross_entropy, nf4, sums of gradients, and
the updates of adamw and muon.

Each kernel has a PyTorch implementation that gives the same results to rounding; it runs where there is no GPU.
"""
