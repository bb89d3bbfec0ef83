"""Everything that is a network: layers, kernels, adapters, and a folder for each family. Knows no file and no run."""
