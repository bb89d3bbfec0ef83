"""Pseudo-random bits for rows of a token store: a pure function of a key and a row, whatever is drawn beside it."""

import hashlib

import numpy as np

GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # the step of splitmix64


def row_bits(key, ids):
    """uint64 (rows,): 64 bits of each of the rows `ids`; the text `key` selects them."""
    first = np.frombuffer(hashlib.sha512(key.encode()).digest(), np.uint64)[0]
    return mixed_bits(mixed_bits(first + np.asarray(ids).astype(np.uint64) * GOLDEN))


def place_bits(bits, counts):
    """uint64: for the `bits` of each row, 64 bits for each of so many places, one row after the other."""
    return mixed_bits(np.repeat(bits, counts) + (places(counts) + 1).astype(np.uint64) * GOLDEN)


def places(counts):
    """int64: 0, 1, … below each of `counts`, one after the other."""
    counts = np.asarray(counts, np.int64)
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


def mixed_bits(values):
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014): each output bit depends on all input bits."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
