"""Generates token ids from token ids. Knows the network and the tokenizer, but no run.

answers generates the greedy answers of a model to stored prompts, in batches, with transformers' generate.
"""
