"""Columns of a token store that need a model: computed once from the weights that a run starts from, and kept.

They are written part by part, so a stop or a kill loses a part. Where parts begin does not change the numbers: always
the same rows are packed together.
"""

import hashlib
import logging
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from model.data.packing import cut
from model.data.token_store import open_column
from model.memory.oom_policy import shrink_plan
from model.memory.plan import MemoryPlan
from model.runtime import fault_injection
from model.runtime.atomic_io import held_lock, whole_directory
from model.runtime.distributed import local_main_first, sum_over_ranks, vote
from model.runtime.watchdog import stop_asked
from model.train.evaluate import EPOCH, Parts, evaluating, values_of_share

TOKENS_TOGETHER = 2**15  # of a rank that are packed together, about
PART_SECONDS = 20  # that a part should take
LOGGER = logging.getLogger("chat_trainer")


def derived_directory(examples, reference):
    """Where the derived columns of Examples are kept; `reference` identifies the weights."""
    key = hashlib.sha256(f"{examples.objective.derived} {reference}".encode()).hexdigest()[:16]
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


def derive(ranks, model, examples, plan, reference, progress=lambda done: None):
    """Compute the derived columns with the weights of `model` and write them on each machine.

    It begins where an earlier call was stopped, and waits for another run that computes the same. `progress(rows)` is
    called after each part. Raises KeyboardInterrupt if a stop was asked, NothingFits if the smallest plan does not fit,
    ValueError for a number that is not finite.
    """
    with ExitStack() as held:
        local_main_first(ranks, partial(_hold_lock, ranks, derived_directory(examples, reference), held))
        if not is_derived(ranks, examples, reference):
            _derive(ranks, model, with_zeros(examples), plan, derived_directory(examples, reference), progress)


def _hold_lock(ranks, folder, held):
    """Make the ExitStack `held` release a lock, which the main rank holds, as no two runs may write one draft."""
    if ranks.is_main:
        held.enter_context(held_lock(folder.with_name(f".{folder.name}.lock"), stop_asked))


def _derive(ranks, model, examples, plan, folder, progress):
    names, draft, together = examples.objective.derived, folder.with_suffix(".part"), rows_together(examples)
    together *= ranks.world_size
    local_main_first(ranks, partial(_begin, draft, names, len(examples)))
    columns = {name: open_column(draft / f"{name}.npy", len(examples), mode="r+") for name in names}
    done, count, number = _rows_done(ranks, columns) // together * together, together, 0
    with evaluating(model):
        while done < len(examples):
            started, number, end = time.monotonic(), number + 1, min(done + count, len(examples))
            values, plan = _values(ranks, model, examples, (done, end), plan, number)
            if values is None:
                raise KeyboardInterrupt
            for name, column in columns.items():
                found = _gathered(ranks, (done, end), name, values)
                _check_finite(found, done, examples)
                if ranks.is_local_main:
                    column[done:end] = found
            (milliseconds,) = vote(ranks, int(1000 * (time.monotonic() - started)))
            done, count = end, _next_count(count, milliseconds / 1000, together)
            progress(done)
    local_main_first(ranks, partial(_finish, draft, folder, columns))


def rows_together(examples):
    """Rows of a rank that are packed together; a part is some of these."""
    return max(TOKENS_TOGETHER * len(examples) // int(examples.bounds.sum(dtype=np.int64)), 1)


def _begin(draft, names, num_rows):
    """Make the columns, all of it still to be computed, unless an earlier call has."""
    if draft.is_dir():
        try:
            for name in names:
                open_column(draft / f"{name}.npy", num_rows)
            return
        except (ValueError, FileNotFoundError):
            LOGGER.warning("%s is damaged and made anew", draft)
    with whole_directory(draft) as folder:
        for name in names:
            np.save(folder / f"{name}.npy", np.full(num_rows, np.nan, np.float32))


def _rows_done(ranks, columns):
    """Rows before the first one that any machine lacks."""
    lacking = np.zeros(len(next(iter(columns.values()))), bool)
    for column in columns.values():
        lacking |= np.isnan(column)
    first = int(lacking.argmax()) if lacking.any() else len(lacking)
    return -vote(ranks, -first)[0]


def _values(ranks, model, examples, rows, plan, number):
    """([(ids, {name: values})] of this rank's share of the rows from the first to before the second, the plan).

    None for the list if a stop was asked; the plan is a smaller one after an out of memory.
    """
    plans = [plan]

    def value(ids, plan):
        fault_injection.fire("derive", number)
        batch = examples.batch(ids, EPOCH).to(ranks.device)
        columns = examples.objective.derive(model, batch, plan.chunk_tokens)
        return ids, {name: column.float().cpu() for name, column in columns.items()}

    def cut_up(ids, plan):
        together = rows_together(examples)
        blocks = np.split(ids, range(together, len(ids), together))
        parts = (cut(block, examples.lengths(block, EPOCH), plan.micro_batch_tokens) for block in blocks)
        return [ids for part in parts for ids in part]

    def note(kind, before, after, **values):
        plans.append(MemoryPlan(**after))
        said = "out of memory while the reference's log-probabilities are computed: %d tokens at a time from now on"
        LOGGER.info(said, plans[-1].micro_batch_tokens)

    shrink = partial(shrink_plan, longest_tokens=examples.histogram.longest)
    share_ids = np.arange(rows[0] + ranks.rank, rows[1], ranks.world_size)
    return values_of_share(ranks, share_ids, plan, Parts(cut_up, value, shrink), note), plans[-1]


def _next_count(count, seconds, together):
    """Rows of the next part, a multiple of `together`; at most four times as many as of the last one."""
    wanted = count * min(PART_SECONDS / max(seconds, 1e-3), 4)
    return max(int(wanted) // together, 1) * together


def _gathered(ranks, rows, name, values):
    """float32 of the rows of a part in one column, from the values that each rank has of its share."""
    column = torch.zeros(rows[1] - rows[0])
    for ids, columns in values:
        column[ids - rows[0]] = columns[name]
    return sum_over_ranks(ranks, column.to(ranks.device)).cpu().numpy()


def _check_finite(found, first, examples):
    if not np.isfinite(found).all():
        row = first + int(np.flatnonzero(~np.isfinite(found))[0])
        raise ValueError(
            f"row {row} of the tokens in {examples.store.directory} has no finite log-probability under the weights "
            "that the run starts from: they may be damaged"
        )


def _finish(draft, folder, columns):
    for column in columns.values():
        column.flush()
    if draft.is_dir() and not folder.is_dir():
        draft.rename(folder)
