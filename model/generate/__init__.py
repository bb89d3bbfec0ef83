"""Generates token ids from token ids. Knows the network and the tokenizer, but no run.

engine generates what follows, greedily, with the network's own cache.
"""
