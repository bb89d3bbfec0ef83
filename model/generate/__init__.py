"""From token ids to new token ids. Knows the network and the tokenizer, and no run.

answers gives the greedy answers of a model to stored prompts, in batches, with transformers' generate.
"""
