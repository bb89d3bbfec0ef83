"""From data files to packed lists of token ids. Uses numbers and text only: no tensors, no model and no run."""
