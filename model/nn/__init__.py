"""Everything that is a network: layers, kernels, weights. Knows no files of pairs, no optimizer, no ranks and no run.

attention works on packed examples; loss is the linear layer with cross-entropy that never holds all logits.
flat_params keeps weights, gradients and bf16 copies in three flat tensors; weights_io reads and writes them.
kernels/ holds the Triton kernels, each beside a plain implementation that gives the same numbers.
Each folder beside it is a family, a network architecture; t5/ is one.
"""
