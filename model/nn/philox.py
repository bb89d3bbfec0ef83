"""Philox 4x32: random bits as a function of a counter and a key, without a state.

Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3" (SC11). Any of its numbers can be computed by itself,
in any order and on any device, so what is drawn for a token does not depend on where the token lies.
"""

ROUNDS = 7  # the fewest that pass BigCrush (table 2 of the paper)
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)  # added to the key after each round
MASK = 2**32 - 1


def philox(counter, key, rounds=ROUNDS):
    """Four words of 32 random bits for each `counter`, as int64.

    `counter` holds four int64 tensors that broadcast against each other, `key` two such tensors or integers; their
    values are in [0, 2^32).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        high0, low0 = _multiply(c0, MULTIPLIERS[0])
        high2, low2 = _multiply(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high2 ^ c1 ^ k0, low2, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + KEY_STEPS[0]) & MASK, (k1 + KEY_STEPS[1]) & MASK
    return c0, c1, c2, c3


def _multiply(word, multiplier):
    """(high, low) 32 bits of the product, which has 64.

    The negative number multiplier - 2^32 takes its place, because int64 holds any product with that: the high bits are
    then too small by `word`.
    """
    product = word * (multiplier - 2**32)
    return ((product >> 32) + word) & MASK, product & MASK
