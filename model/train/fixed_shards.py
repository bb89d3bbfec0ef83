"""The same bits on any number of CPU processes (`exact=True`).

A step's examples are divided among NUM_SHARDS logical shards, whatever the number of ranks. The gradient of each shard
is computed separately, and the gradients are added in the order of the shards. The sum therefore does not depend on
which rank computed which shard.
"""

import torch

from model.runtime.distributed import broadcast

NUM_SHARDS = 12  # divides evenly among 1, 2, 3, 4, 6 or 12 ranks


def shards_of_rank(ranks):
    """Numbers of the shards that this rank computes; empty on the ranks beyond the first NUM_SHARDS."""
    return range(ranks.rank, NUM_SHARDS, ranks.world_size)


def add_in_order(ranks, shards, total):
    """Set `total` to the sum of all shards, added in order; `shards` are this rank's, each in the shape of `total`."""
    own_shards = dict(zip(shards_of_rank(ranks), shards, strict=True))
    total.zero_()
    for number in range(NUM_SHARDS):
        shard = own_shards.get(number)
        shard = torch.empty_like(total) if shard is None else shard
        broadcast(ranks, [shard], number % ranks.world_size)
        total.add_(shard)
