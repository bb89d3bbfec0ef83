"""Neural networks: layers, kernels and weights. Knows nothing of data files, optimizers, ranks or runs."""
