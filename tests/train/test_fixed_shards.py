from dataclasses import replace

import pytest
import torch

from config import load_config
from model.commands.network import set_numerics
from model.runtime.distributed import ALONE, Ranks
from model.train.fixed_shards import NUM_SHARDS, shards_of_rank
from tests.tiny import NUM_PAIRS, OPTIONS, ids_by_epoch, journal, train, weights_hash

EVERY_ID_ONCE = {epoch: list(range(NUM_PAIRS)) for epoch in range(1, OPTIONS["epochs"] + 1)}
EXACT = dict(exact=True, dropout=0.1)  # 8 pairs a step: some of the 12 shards are empty


@pytest.fixture(scope="module")
def alone(home):
    """sha256 of the final weights of a run in one process."""
    done = train(home, output_dir="alone", **EXACT)
    assert done.codes == [0], done.text
    return weights_hash(home / "alone")


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 13])
def test_each_shard_belongs_to_exactly_one_rank(world):
    numbers = [n for r in range(world) for n in shards_of_rank(Ranks(r, world, r, torch.device("cpu"), "gloo", None))]
    assert sorted(numbers) == list(range(NUM_SHARDS))


@pytest.mark.parametrize("world", [2, 3, 4])
def test_exact_ends_with_the_same_bits_on_any_number_of_ranks(home, alone, world):
    done = train(home, world, output_dir=f"world{world}", **EXACT)
    assert done.codes == [0] * world, done.text
    assert weights_hash(home / f"world{world}") == alone
    assert ids_by_epoch(home / f"world{world}") == EVERY_ID_ONCE


def test_without_exact_the_bits_depend_on_the_number_of_ranks(home):
    hashes = set()
    for world in (1, 3):
        done = train(home, world, output_dir=f"inexact{world}")
        assert done.codes == [0] * world, done.text
        hashes.add(weights_hash(home / f"inexact{world}"))
    assert len(hashes) == 2


def test_exact_ends_with_the_same_bits_when_resumed_on_2_1_4_3_and_2_ranks(home, alone):
    keep = False
    for world, killed_at in ((2, 4), (1, 6), (4, 8), (3, 10), (2, None)):
        fault = f"forward:all:{killed_at}:kill" if killed_at else ""
        done = train(home, world, fault, output_dir="elastic", is_keep_training=keep, **EXACT)
        assert set(done.codes) == ({-9} if killed_at else {0}), done.text
        keep = True
    assert [line["world"] for line in journal(home / "elastic", "start")] == [2, 1, 4, 3, 2]
    assert weights_hash(home / "elastic") == alone
    assert ids_by_epoch(home / "elastic") == EVERY_ID_ONCE


def test_exact_is_refused_on_a_gpu_with_both_remedies():
    with pytest.raises(ValueError, match="CUDA_VISIBLE_DEVICES= .*--deterministic=True"):
        set_numerics(load_config("pretrain", dict(exact=True)), replace(ALONE, device=torch.device("cuda", 0)))
