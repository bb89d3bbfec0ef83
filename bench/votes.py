"""The cost of the vote in each step: the same steps with the vote and without it, alternating.

    torchrun --nproc_per_node 2 -m bench.votes --corpus DIR [--model small] [--pairs 64,256] [--optimizers muon]
        [--any_field=value]

Without the vote each rank acts on its own result; gradients are summed over ranks in both cases. DIR is created if it
does not exist. Rank 0 prints a JSON line for each number of pairs and optimizer: the median step time of both, the
median over the rounds of the difference, the time of the gradients' sum over ranks alone, and the speed with the vote:
the median over steps of real tokens, of all ranks, a second. Numbers of ranks are compared by it, for their steps have
other examples.
"""

import argparse
import json
import os
import statistics
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path

from bench.corpus import write_corpus
from bench.runs import prepare, typed
from model.runtime.device_memory import release_memory
from model.runtime.distributed import from_main, start_ranks, stop_ranks, vote
from model.train.reduction import sum_gradients
from model.train.step import Position, train_steps

CORPUS_PAIRS, WARM_STEPS, STEPS = 51_200, 40, 60
EXCHANGES = 20  # timed sums over ranks


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--model", default="small")
    parser.add_argument("--pairs", default="256", help="per rank and step")
    parser.add_argument("--optimizers", default="muon")
    parser.add_argument("--corpus_pairs", type=int, default=CORPUS_PAIRS)
    parser.add_argument("--steps", type=int, default=STEPS, help="timed steps per round, with and without the vote")
    parser.add_argument("--warm_steps", type=int, default=WARM_STEPS, help="untimed steps before them")
    parser.add_argument("--rounds", type=int, default=6)
    given, words = parser.parse_known_args()
    ranks = start_ranks()
    from_main(ranks, lambda: given.corpus.exists() or bool(write_corpus(given.corpus, given.corpus_pairs)))
    os.chdir(given.corpus)
    more = typed(words)
    for pairs in map(int, given.pairs.split(",")):
        for optimizer in given.optimizers.split(","):
            values = cell(ranks, given, dict(batch_size_per_gpu=pairs, optimizer=optimizer), more)
            if ranks.is_main:
                print(json.dumps(values), flush=True)
            release_memory()
    stop_ranks()


def cell(ranks, given, kind, more):
    """The values of one kind of steps, its pairs and its optimizer, as options."""
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "")  # others may be timed at once
    name = "_".join(map(str, ("votes", given.model, *kind.values(), ranks.world_size, gpus)))
    run, plan = prepare(ranks, more | kind | dict(model=given.model, output_dir=f"runs/{name}"))
    rounds, speeds = timed_rounds(run, plan, given)
    exchange = exchange_milliseconds(run)
    with_vote, without = (statistics.median(times) for times in zip(*rounds, strict=True))
    cost = statistics.median(a - b for a, b in rounds)
    return dict(
        harness="votes", world=ranks.world_size, backend=ranks.backend, model=given.model,
        pairs=run.config.batch_size_per_gpu, optimizer=run.config.optimizer,
        step_ms=round(with_vote, 3), without_vote_ms=round(without, 3), vote_ms=round(cost, 3),
        percent_of_the_step=round(100 * cost / without, 2), exchange_ms=round(exchange, 3),
        tokens_per_second=round(statistics.median(speeds)), load=round(os.getloadavg()[0], 1),
        rounds=[[round(a, 3), round(b, 3)] for a, b in rounds],
    )  # fmt: skip


def timed_rounds(run, plan, given):
    """([(step ms with the vote, without it)], [tokens a second with it]) of each round."""
    rounds, speeds = [], []
    for _ in range(given.rounds):
        groups, num_steps = (run.ranks.cpu_group, None), (given.warm_steps, given.steps)
        (with_vote, speed), (without, _) = (timed_steps(run, plan, group, num_steps) for group in groups)
        rounds.append((with_vote, without))
        speeds.append(speed)
    return rounds, speeds


def timed_steps(run, plan, cpu_group, num_steps):
    """(median step time in ms, median real tokens a second) after untimed steps, `num_steps` = (untimed, timed).

    Ranks vote over `cpu_group`, or not at all if it is None.
    """
    ranks = replace(run.ranks, cpu_group=cpu_group)
    steps = train_steps(replace(run.context, ranks=ranks), Position(plan))
    results = list(islice(steps, num_steps[0], sum(num_steps)))
    speed = statistics.median(result.tokens / result.step_seconds for result in results)
    return 1000 * statistics.median(result.step_seconds for result in results), speed


def exchange_milliseconds(run):
    """Median time of one sum of the gradients over ranks with nothing beside it."""
    ranks, times = run.ranks, []
    for _ in range(EXCHANGES):
        vote(ranks, 0)  # all ranks begin together
        started = time.perf_counter()
        sum_gradients(ranks, run.model, run.config.reduce_dtype)
        float(run.model.flat.sums[0])  # waits for the device
        times.append(time.perf_counter() - started)
    return 1000 * statistics.median(times)


if __name__ == "__main__":
    main()
