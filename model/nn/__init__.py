"""Neural networks: layers, kernels and weights. Knows nothing of data files, optimizers, ranks or runs.

attention works on packed examples; loss is the output projection with cross-entropy and never holds all logits.
dropout draws its masks with philox, from what a token is and not from where it lies.
flat_params keeps weights, gradients and bf16 copies in three flat tensors; weights_io reads and writes model files.
kernels/ holds the Triton kernels; each has a PyTorch implementation that gives the same results to rounding.
Every other folder holds one family, a network architecture; t5/ is one.
"""
