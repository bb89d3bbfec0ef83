"""Parts of one tensor that ranks sum, each into its own place."""

import torch

from model.runtime.distributed import start_ranks, stop_ranks
from model.runtime.exchange import sum_parts
from tests.ranks import run_ranks


def sum_two_parts():
    ranks = start_ranks("gloo", 60)
    for sizes in ((4, 4), (5, 3), (0, 8)):
        parts = (torch.arange(8.0) + 100 * ranks.rank).split(sizes)
        sum_parts(ranks, parts)
        assert torch.equal(parts[ranks.rank], (2 * torch.arange(8.0) + 100).split(sizes)[ranks.rank]), sizes
    stop_ranks()
    return 0


def test_each_rank_gets_the_sum_of_its_part_whether_parts_are_equal_or_not(tmp_path):
    done = run_ranks(2, sum_two_parts, folder=tmp_path)
    assert done.codes == [0, 0], done.text
