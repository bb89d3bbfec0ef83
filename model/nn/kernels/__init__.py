"""Triton kernels: attention, decode_attention, norm (with the residual sum), rotary, dropout, gate, cross_entropy, nf4,
lora, sums of gradients, and the updates of adamw and muon.

Each kernel has a PyTorch implementation that gives the same results to rounding; it runs where there is no GPU.
"""
