"""A rank's examples of each step, cut and packed in host memory while the previous step runs."""

from dataclasses import dataclass

import numpy as np

from model.data.buckets import Bucket
from model.data.packing import cut
from model.data.sampler import share_of, step_at
from model.memory.plan import MemoryPlan
from model.nn.t5.batch import collate
from model.runtime.device_memory import is_out_of_memory
from model.train.fixed_shards import NUM_SHARDS, shards_of_rank
from model.train.lr_schedule import learn_rate_at


@dataclass(frozen=True)
class Schedule:
    """The values that, with the configuration, determine every step of a run."""

    total_pairs: int  # over all epochs
    warmup_pairs: int
    global_batch: int  # pairs per step
    start_id: int  # first token of the decoder's input


@dataclass(frozen=True)
class Work:
    """A step, and one rank's part of it."""

    step: int  # from 1, as in the journal
    epoch: int  # from 1
    all_ids: np.ndarray  # the step's examples, over all ranks
    tokens: int  # of prompts and responses, over all ranks
    target_tokens: int  # over all ranks; the step's loss is divided by it
    learn_rate: float
    start_id: int
    shares: tuple  # (number, ids) of each of this rank's shares: one, or with exact=True its shards

    @property
    def ids(self):
        """This rank's examples."""
        return np.concatenate([self.all_ids[:0], *(ids for _, ids in self.shares)])


@dataclass(frozen=True)
class Packed:
    """A rank's micro-batches of a step, in host memory."""

    plan: MemoryPlan  # that determined the micro-batches
    bucket: Bucket | None  # size that the only micro-batch is padded to, to replay a recorded step; None: no padding
    shares: tuple  # (number, micro-batches) of each share

    @property
    def num_micro_batches(self):
        return sum(len(micro_batches) for _, micro_batches in self.shares)


def prepared(ranks, model, store, config, schedule, graphs, plan, step, pairs_seen):
    """(Work, Packed) of the step after `step` steps and `pairs_seen` pairs; None after the run's last step.

    Packed is None if memory ran out while packing.
    """
    if pairs_seen >= schedule.total_pairs:
        return None
    work = work_at(ranks, store, config, schedule, step, pairs_seen)
    try:
        return work, pack_work(model, store, plan, work, graphs)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    return work, None  # attempt_gradients packs again, and reports the failure if it repeats


def work_at(ranks, store, config, schedule, step, pairs_seen):
    """The Work of the step after `step` steps and `pairs_seen` pairs."""
    examples = step_at(pairs_seen, len(store), schedule.global_batch, config.seed)
    lengths = store.lengths[examples.ids].astype(np.int64)
    rate = learn_rate_at(pairs_seen + len(examples.ids) / 2, config, schedule.warmup_pairs, schedule.total_pairs)
    numbers, count = (shards_of_rank(ranks), NUM_SHARDS) if config.exact else ([ranks.rank], ranks.world_size)
    shares = tuple((number, share_of(examples.ids, lengths, number, count)) for number in numbers)
    sizes = (int(lengths.sum()), int(lengths[:, 1].sum()))
    return Work(step + 1, examples.epoch, examples.ids, *sizes, rate, schedule.start_id, shares)


def pack_work(model, store, plan, work, graphs=None):
    """`work` cut into the micro-batches of `plan`; a single micro-batch is padded to a bucket if it fits one."""
    parts = [(number, cut(ids, store.lengths[ids], plan.micro_batch_tokens)) for number, ids in work.shares]
    can_record = graphs and plan.graphs and [len(p) for _, p in parts] == [1]
    bucket = graphs.bucket_of(store.lengths[work.ids], plan.micro_batch_tokens) if can_record else None
    options = (work.start_id, "cpu", model.uses_kernels, bucket, model.dropout > 0)
    shares = [(number, [collate(store, ids, *options) for ids in share]) for number, share in parts]
    return Packed(plan, bucket, tuple(shares))
