"""Predicts how long a step takes with a plan beside others, and which steps it captures."""

import math
from functools import lru_cache

import numpy as np

from model.data.buckets import buckets_for
from model.data.sampler import shares_of
from model.nn.memory_spec import count_numbers

CHUNK_LAUNCHES = 0.006  # launch time of a chunk / launch time of a forward and backward
CHECKPOINTING_WORK, CHECKPOINTING_LAUNCHES = 0.3, 1.2  # of all blocks: more compute and launch time / those without
# Tokens computed in the time in which a forward and backward take all matrices out of NF4, twice; to compute the blocks
# again takes them out a third time. Measured on an H200; by their data sheets 100 to 200 on smaller cards.
UNPACKING_TOKENS = 200
# Operations that a GPU computes in the time in which a byte crosses the link to the host: an H100, 20 GB/s. The more,
# the slower a link is for its GPU; smaller cards have fewer.
LINK_OPERATIONS = 20_000
GRAPH_LAUNCHES = 0.1  # time of replaying a graph of few tokens / time of launching it
MAX_DRAWN_STEPS, MAX_DRAWN_PAIRS = 256, 2**18  # sample from which the share of captured steps is estimated


def time_factor(plan, estimate):
    """Predicted time of a step / time of the same step in one forward with unlimited memory and unpacked weights."""
    launch_tokens, tokens = estimate.spec.network_launch_tokens, estimate.share_pairs * estimate.lengths.mean
    return step_tokens(plan, estimate) / max(tokens, launch_tokens)


def step_tokens(plan, estimate):
    """Predicted time of a step, captured or not as `plan` says, in the tokens that the GPU computes in it."""
    launch_tokens, (_, captured) = estimate.spec.network_launch_tokens, captured_by(estimate, plan)
    time = captured * _step_time(plan, estimate, GRAPH_LAUNCHES * launch_tokens)
    return time + (1 - captured) * _step_time(plan, estimate, launch_tokens)


def _step_time(plan, estimate, launch_tokens):
    """Time of a step, measured in the tokens that the GPU computes in it.

    `launch_tokens` is the time of launching a forward and backward. Each forward takes the longer of its computation
    and its launches.
    """
    forwards = estimate.forwards(plan.micro_batch_tokens)
    tokens = estimate.share_pairs * estimate.lengths.mean / forwards
    again = plan.gradient_checkpointing / estimate.num_blocks
    compute, launches = (1 + CHECKPOINTING_WORK * again) * tokens, (1 + CHECKPOINTING_LAUNCHES * again) * launch_tokens
    if estimate.computes_logits_again(plan.gradient_checkpointing):  # one product of the three of an output weight
        config = estimate.spec.model_config
        compute += tokens * config.vocab_size * config.width / (3 * estimate.spec.parameters)
    compute += UNPACKING_TOKENS * (1 + again / 2) * estimate.spec.is_packed
    transfers = _transfer_work(plan, estimate.spec) * tokens
    return forwards * (max(compute, launches, transfers) + tokens / plan.chunk_tokens * CHUNK_LAUNCHES * launch_tokens)


def _transfer_work(plan, spec):
    """Time in which what a token leaves to recomputed blocks goes to the host and back / time of computing a token."""
    if not spec.offloads_inputs:
        return 0.0
    sent = 2 * spec.number_bytes * spec.model_config.width * plan.gradient_checkpointing
    operations = (4 if spec.lora else 6) * count_numbers(spec.family, spec.model_config).matrices
    return LINK_OPERATIONS * sent / operations


@lru_cache(maxsize=1)
def graph_sizes(estimate):
    """[(tokens, share of steps that the buckets of at most so many tokens hold)], ascending, from a sample."""
    lengths, share_pairs, num_ranks = estimate.lengths, estimate.share_pairs, estimate.spec.num_ranks
    is_stream, pairs = estimate.spec.family.reads_one_stream, num_ranks * share_pairs
    buckets = buckets_for(lengths.tokens, share_pairs, lengths.counts, is_stream, num_ranks)
    draw, num_steps = np.random.default_rng(0), min(MAX_DRAWN_STEPS, max(MAX_DRAWN_PAIRS // pairs, 16))
    kinds = draw.choice(len(lengths.counts), (num_steps, pairs), p=lengths.counts / lengths.counts.sum())
    steps = [lengths.tokens[own] for step in kinds for own in shares_of(step, lengths.tokens[step], num_ranks)]
    least = np.array(
        [min((bucket.tokens for bucket in buckets if bucket.holds(step)), default=math.inf) for step in steps]
    )
    return [(size, float(np.mean(least <= size))) for size in sorted({bucket.tokens for bucket in buckets})]


def captured_by(estimate, plan):
    """(tokens of the largest step that `plan` captures, share of steps that it captures)."""
    sizes = [pair for pair in graph_sizes(estimate) if plan.graphs and pair[0] <= plan.micro_batch_tokens]
    return sizes[-1] if sizes else (0, 0.0)
