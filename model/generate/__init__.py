"""Generates token ids from token ids. Knows the network, but no tokenizer and no run."""
