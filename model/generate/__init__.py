"""Generates token ids from token ids. Knows the network, but no tokenizer and no run.

sampling chooses a token from logits, screen the likeliest one without all logits, on a CPU; slots holds the decoding
state of the answers under way; engine fills the slots with requests, one after the other, and decodes them together.
"""
