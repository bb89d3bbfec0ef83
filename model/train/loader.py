"""Loader: a rank's examples of each step, cut and packed in host memory while the previous step runs."""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from model.data.buckets import Bucket, buckets_for
from model.data.packing import cut
from model.data.sampler import shares_of, step_at
from model.memory.plan import MemoryPlan
from model.runtime.device_memory import within_memory
from model.runtime.distributed import Ranks
from model.train.examples import Examples
from model.train.lr_schedule import LearnRate


@dataclass(frozen=True)
class Schedule:
    """The values that determine every step of a run."""

    total_pairs: int  # over all epochs
    global_batch: int  # pairs per step
    seed: int
    learn_rate: LearnRate


@dataclass(frozen=True)
class Work:
    """A step, and one rank's part of it."""

    step: int  # from 1, as in the journal
    epoch: int  # from 1
    all_ids: np.ndarray  # the step's examples, over all ranks
    tokens: int  # of sources and targets, over all ranks
    loss_weights: tuple  # what the step's loss sums are divided by, over all ranks
    metric_weights: tuple  # what its metric sums are divided by
    learn_rate: float
    ids: np.ndarray  # this rank's examples


@dataclass(frozen=True)
class Packed:
    """A rank's micro-batches of a step, in host memory."""

    plan: MemoryPlan  # that determined the micro-batches
    bucket: Bucket | None  # size that the only micro-batch is padded to, to replay a captured step; None: no padding
    micro_batches: list


@dataclass(frozen=True)
class Loader:
    """Makes the Work of each step, and its micro-batches on a thread, one step ahead."""

    ranks: Ranks
    examples: Examples
    schedule: Schedule

    @cached_property
    def buckets(self):
        """Buckets for the steps that are captured."""
        lengths, num_ranks = self.examples.histogram, self.ranks.world_size
        share_pairs, is_stream = -(-self.schedule.global_batch // num_ranks), self.examples.family.reads_one_stream
        return buckets_for(lengths.tokens, share_pairs, lengths.counts, is_stream, num_ranks)

    def work_at(self, step, pairs_seen):
        """The Work of the step after `step` steps and `pairs_seen` pairs."""
        schedule, examples, ranks = self.schedule, self.examples, self.ranks
        most = min(schedule.global_batch, schedule.total_pairs - pairs_seen)
        drawn = step_at(pairs_seen, examples.epoch_pairs, most, schedule.seed, examples.mixture)
        lengths = examples.lengths(drawn.ids, drawn.epoch)
        ids = shares_of(drawn.ids, lengths, ranks.world_size)[ranks.rank]
        rate = schedule.learn_rate.at(pairs_seen + len(drawn.ids) / 2)
        weights = examples.weights(drawn.ids, drawn.epoch)
        return Work(step + 1, drawn.epoch, drawn.ids, int(lengths.sum()), *weights, rate, ids)

    def pack(self, work, plan):
        """`work` cut into the micro-batches of `plan`; a single micro-batch is padded to a bucket if it fits one."""
        examples, epoch = self.examples, work.epoch
        lengths = examples.lengths(work.ids, epoch)
        parts = cut(work.ids, lengths, plan.micro_batch_tokens)
        bucket = self._bucket_of(lengths, plan) if plan.graphs and len(parts) == 1 else None
        return Packed(plan, bucket, [examples.batch(ids, epoch, bucket) for ids in parts])

    def _bucket_of(self, lengths, plan):
        """The smallest Bucket within the plan's micro-batch that holds examples of these lengths, or None."""
        return next((bucket for bucket in self._allowed_by(plan) if bucket.holds(lengths)), None)

    def _allowed_by(self, plan):
        return [bucket for bucket in self.buckets if bucket.tokens <= plan.micro_batch_tokens]

    def in_largest_bucket(self, work, plan):
        """The batch of `work`, which fits a bucket, padded to the largest one of the plan that has room for it."""
        examples, epoch = self.examples, work.epoch
        lengths = examples.lengths(work.ids, epoch)
        *_, bucket = (bucket for bucket in self._allowed_by(plan) if bucket.has_room_for(lengths))
        return examples.batch(work.ids, epoch, bucket)

    def ahead(self):
        """A PackingThread for this loader."""
        return PackingThread(self)


class PackingThread:
    """Packs the next step's micro-batches on a thread, while the caller computes the current step."""

    def __init__(self, loader):
        self._loader, self._upcoming = loader, None

    def __enter__(self):
        self._thread = ThreadPoolExecutor(1).__enter__()
        return self

    def __exit__(self, *error):
        self._thread.__exit__(*error)

    def start(self, plan, step, pairs_seen):
        """Begin to pack the step after `step` steps and `pairs_seen` pairs, unless the run ends there."""
        if pairs_seen < self._loader.schedule.total_pairs:
            self._upcoming = self._thread.submit(self._prepare, plan, step, pairs_seen)

    def take(self):
        """(Work, Packed or None if memory ran out, seconds waited) of the step that `start` began to pack."""
        started = time.perf_counter()
        return *self._upcoming.result(), time.perf_counter() - started

    def _prepare(self, plan, step, pairs_seen):
        work = self._loader.work_at(step, pairs_seen)
        _, packed = within_memory(self._loader.pack, work, plan)  # attempt_gradients packs again if memory ran out
        return work, packed
