"""Ids to new ids: decoding, sampling, slots. Knows no tokenizer and no run."""
