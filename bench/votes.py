"""What the vote of a step costs: milliseconds of a step and none of them computing.

    torchrun --nproc_per_node 2 -m bench.votes [--step_ms 24] [--votes 500]

All ranks wait until the same moment, `step_ms` after the vote before, and vote as a step does: what is timed is the
exchange and not the wait for a slower rank. Rank 0 prints one JSON line: percentiles in microseconds of the slowest
rank, and the median's share of such a step. The clock is one machine's, so all ranks must be on it.
"""

import argparse
import json
import os
import time

import numpy as np

from model.ranks import gather_json, start_ranks, stop_ranks, vote

WARM_UP = 20


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--step_ms", type=float, default=24.0, help="milliseconds of a step (24: small, 256 pairs)")
    parser.add_argument("--votes", type=int, default=500)
    given = parser.parse_args()
    ranks = start_ranks()
    seconds = np.max(gather_json(ranks, vote_seconds(ranks, given.votes, given.step_ms / 1000)), axis=0)
    tenth, median, high = (float(np.quantile(seconds, share)) * 1e6 for share in (0.1, 0.5, 0.95))
    if ranks.is_main:
        print(json.dumps(dict(
            harness="votes", world=ranks.world_size, backend=ranks.backend, p10_microseconds=round(tenth, 1),
            median_microseconds=round(median, 1), p95_microseconds=round(high, 1), step_ms=given.step_ms,
            percent_of_the_step=round(median / given.step_ms / 10, 3), load=round(os.getloadavg()[0], 1),
        )))  # fmt: skip
    stop_ranks()


def vote_seconds(ranks, num_votes, step_seconds):
    """Seconds that this rank spent in each of `num_votes` votes, one a step."""
    seconds = []
    for step in range(WARM_UP + num_votes):
        (begin,) = vote(ranks, time.monotonic_ns())
        begin += int(step_seconds * 1e9)
        time.sleep(max((begin - time.monotonic_ns()) / 1e9 - 0.001, 0))
        while time.monotonic_ns() < begin:
            pass
        vote(ranks, ranks.rank, False, int(time.monotonic()), step, -step)
        seconds.append((time.monotonic_ns() - begin) / 1e9)
    return seconds[WARM_UP:]


if __name__ == "__main__":
    main()
