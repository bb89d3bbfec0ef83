"""Columns of a token store that need a model: computed once from the weights that a run starts from, and kept."""

import hashlib
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from model.data.packing import cut
from model.data.token_store import open_column
from model.memory.oom_policy import shrink_plan
from model.runtime.atomic_io import whole_directory
from model.runtime.distributed import local_main_first, sum_over_ranks, vote
from model.train.evaluate import EPOCH, Parts, evaluating, values_of_share


def derived_directory(examples, reference):
    """Where the derived columns of Examples are kept; `reference` identifies the weights."""
    key = hashlib.sha256(f"{examples.objective} {reference}".encode()).hexdigest()[:16]
    return examples.store.directory / f"derived_{key}"


def is_derived(ranks, examples, reference):
    """True if the objective needs no derived column, or if every machine has them."""
    is_missing = examples.objective.derived and not derived_directory(examples, reference).is_dir()
    return not vote(ranks, bool(is_missing))[0]


def with_zeros(examples):
    """Examples whose derived columns are zeros, which `derive` and the dry run need."""
    zeros = {name: np.zeros(len(examples), np.float32) for name in examples.objective.derived}
    return replace(examples, store=replace(examples.store, values=examples.store.values | zeros))


def with_derived(examples, reference):
    """Examples with the derived columns from the disk, memory-mapped; raises ValueError for damaged ones."""
    folder = derived_directory(examples, reference)
    names = examples.objective.derived
    try:
        columns = {name: open_column(folder / f"{name}.npy", len(examples)) for name in names}
    except (ValueError, FileNotFoundError) as error:
        raise ValueError(f"the columns in {folder} are damaged ({error}): delete that directory") from None
    return replace(examples, store=replace(examples.store, values=examples.store.values | columns))


def derive(ranks, model, examples, plan, reference):
    """Compute the derived columns with the weights of `model` and write them on each machine.

    Raises KeyboardInterrupt if a stop was asked, NothingFits if the smallest plan does not fit.
    """
    examples = with_zeros(examples)

    def value(ids, plan):
        batch = examples.batch(ids, EPOCH).to(model.device)
        columns = examples.objective.derive(model, batch, plan.chunk_tokens)
        return ids, {name: column.float().cpu() for name, column in columns.items()}

    def cut_up(ids, plan):
        return cut(ids, examples.lengths(ids, EPOCH), plan.micro_batch_tokens)

    shrink = partial(shrink_plan, longest_tokens=examples.histogram.longest)
    share_ids = np.arange(ranks.rank, len(examples), ranks.world_size)
    with evaluating(model):
        values = values_of_share(ranks, share_ids, plan, Parts(cut_up, value, shrink))
    if values is None:
        raise KeyboardInterrupt
    columns = {name: _gathered(ranks, len(examples), name, values) for name in examples.objective.derived}
    local_main_first(ranks, partial(_write, derived_directory(examples, reference), columns))


def _gathered(ranks, num_rows, name, values):
    """float32 (rows,) of one column, from the values that each rank has of its share."""
    column = torch.zeros(num_rows)
    for ids, columns in values:
        column[ids] = columns[name]
    return sum_over_ranks(ranks, column.to(ranks.device)).cpu().numpy()


def _write(folder, columns):
    if not folder.is_dir():
        with whole_directory(folder) as draft:
            for name, column in columns.items():
                np.save(draft / f"{name}.npy", column)
