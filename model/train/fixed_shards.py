"""The same bits on any number of CPU processes (`exact=True`).

A step's examples are dealt to NUM_SHARDS logical shards, whatever the number of ranks. The gradient of each is computed
by itself and all are added in the shards' order, so it does not matter which rank computed which.
"""

import torch

from model.runtime.distributed import broadcast

NUM_SHARDS = 12  # as many on each of 1, 2, 3, 4, 6 or 12 ranks


def shards_of_rank(ranks):
    """Numbers of the shards that this rank computes; none of them where there are more ranks than shards."""
    return range(ranks.rank, NUM_SHARDS, ranks.world_size)


def add_in_order(ranks, shards, total):
    """Set `total` to the sum of all shards, in their order; `shards` are this rank's, each shaped as `total`."""
    mine = dict(zip(shards_of_rank(ranks), shards, strict=True))
    total.zero_()
    for number in range(NUM_SHARDS):
        shard = mine.get(number)
        shard = torch.empty_like(total) if shard is None else shard
        broadcast(ranks, [shard], number % ranks.world_size)
        total.add_(shard)
