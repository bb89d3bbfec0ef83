"""Saves checkpoints from a snapshot in host memory while training goes on, and exports models.

A disk error costs one checkpoint, not the run: earlier checkpoints stay intact and the next save tries again. After an
out-of-memory error the same save is tried again, because the last save of a run has no next one.
"""

import gc
import logging
import threading
import time
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

import torch

from model.formats.adapters import export_adapter
from model.formats.weights import export_model
from model.run.checkpoint import (
    AVERAGE_FILE,
    TENSOR_FILES,
    checkpoint_path,
    files_of,
    save_checkpoint,
    save_state,
)
from model.run.snapshot import Snapshot, gather, make_buffer, snapshot_of
from model.runtime.device_memory import release_memory, within_memory
from model.runtime.distributed import gather_json, vote
from model.runtime.watchdog import saving

LOGGER = logging.getLogger("chat_trainer")


@dataclass(frozen=True)
class Taken:
    """The tensors of a step in host memory, and how far they are written."""

    step: int
    snapshot: Snapshot
    copied: torch.cuda.Event | None  # marks the copies as done; None on a CPU
    seconds: float  # that taking the snapshot took
    drafts: dict = field(init=False)  # {name of a file of tensors: Future of its path, before the rest is written}

    def __post_init__(self):
        object.__setattr__(self, "drafts", {name: Future() for name in files_of(self.snapshot)})


class Saver:
    """Writes the checkpoints of a run on rank 0, one at a time, on a thread. Journals the outcome of each save."""

    def __init__(self, ranks, run_dir, keep, journal):
        self._ranks, self._run_dir, self._keep, self._journal = ranks, run_dir, keep, journal
        self._host_tensors, self._thread = {}, None
        self._newest = None  # Taken, as long as its tensors are in host memory
        self._saved_state = None  # the TrainState of the newest checkpoint
        self.failure = ""  # error message of the newest save, or that it has not ended; empty if it succeeded

    def save(self, state, model, optimizer):
        """Copy weights and optimizer state and start to write them, unless the checkpoint of `state` exists already.

        After an evaluation, which changes only the state of a step, the state is written once the tensors are. Else
        waits for the previous save. Raises RuntimeError on all ranks if the weights differ between ranks.
        """
        check_equal_weights(self._ranks, model, state.step)  # its vote also waits until all ranks wrote their ids
        is_shared, has_tensors = model.flat.is_shared, self._newest is not None and self._newest.step == state.step
        if is_shared:
            (has_tensors,) = vote(self._ranks, has_tensors)
        if not self._ranks.is_main:
            if is_shared and not has_tensors:
                self._gather(None, model, optimizer)
            return
        if has_tensors:
            self._start_thread(self._write_again, state, self._newest, self._thread)
        else:
            with saving():
                self.join()
            with ExitStack() as saving_scope:
                saving_scope.enter_context(saving())
                if taken := self._take(state, model, optimizer):
                    self._start_thread(self._write, state, taken, saving_scope.pop_all())
        if _lies_in_host_memory(model):
            self.join()  # the next update changes it

    def _start_thread(self, write, *args):
        self._thread = threading.Thread(target=write, args=args)  # not a daemon: exit waits for the checkpoint
        self._thread.start()

    def _take(self, state, model, optimizer):
        """The Taken of this step; None if memory does not allow it, which is journalled."""
        started, self._newest = time.monotonic(), None
        snapshot, failure = None, "another rank has no memory to send its part"
        try:
            snapshot = retry_after_oom(lambda: self._snapshot(model, optimizer), lambda: self._free_memory(state))
        except (RuntimeError, MemoryError) as error:
            self._host_tensors.clear()
            failure = error
        if model.flat.is_shared and not self._gather(snapshot, model, optimizer):
            snapshot = None
        if snapshot is None:
            self._report_failure(state, failure)
            return None
        self._newest = Taken(state.step, snapshot, _copied(), time.monotonic() - started)
        return self._newest

    def _gather(self, snapshot, model, optimizer):
        """Whether what ranks share was copied to the tensors of `snapshot`, which rank 0 has; all ranks call it.

        Nothing is sent unless all ranks have the memory, so that none waits for another in vain.
        """
        fits, buffer = within_memory(make_buffer, model)
        (failed,) = vote(self._ranks, not fits or self._ranks.is_main and snapshot is None)
        if not failed:
            gather(self._ranks, model, optimizer, snapshot, buffer)
        return not failed

    def weights_files(self, state, averaged=False):
        """Two paths of the file with the float32 weights at `state`, or with their average; empty if there is none.

        Waits until the weights are written. The file is at the first path until its checkpoint is whole, then at the
        second. Exports link to it, so that the same bytes are not written twice.
        """
        taken = self._newest
        if taken is None or taken.step != state.step:
            return ()
        name = AVERAGE_FILE if averaged else TENSOR_FILES[0]
        draft = taken.drafts[name].result()
        if draft is None or any(tensor.dtype != torch.float32 for tensor in files_of(taken.snapshot)[name].values()):
            return ()
        return draft, checkpoint_path(self._run_dir, state.step) / draft.name

    def join(self):
        """Wait until the last checkpoint is on the disk or has failed."""
        if self._thread is not None:
            self._thread.join()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.join()

    def _snapshot(self, model, optimizer):
        """Snapshot in host memory; what ranks share is not in it yet."""
        source = snapshot_of(model, optimizer)
        if _lies_in_host_memory(model):
            return Snapshot(*(
                tensors | self._copy(part, {name: t for name, t in tensors.items() if t.device.type != "cpu"})
                for part, tensors in (("weights", source.weights), ("optimizer", source.optimizer))
            ))  # fmt: skip
        weights = self._copy("weights", source.weights)
        trained = {name: t for name, t in source.average.items() if t is not source.weights[name]}
        average = weights | self._copy("average", trained) if trained else {}
        return Snapshot(weights, self._copy("optimizer", source.optimizer), average)

    def _free_memory(self, state):
        """Journal that a save ran out of memory, and free the host tensors that snapshots reuse."""
        self._journal.write("oom", step=state.step, where="save", rank=0, before=None, after=None)
        self._host_tensors.clear()
        gc.collect()

    def _copy(self, part, tensors):
        """Copies of `tensors` in host memory, which each snapshot reuses; page-locked if they come from a GPU."""
        for name, tensor in tensors.items():
            host = self._host_tensors.get((part, name))
            if host is None or (host.shape, host.dtype) != (tensor.shape, tensor.dtype):
                is_from_gpu = tensor.is_cuda or tensor.is_meta and torch.cuda.is_initialized()
                host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=is_from_gpu)
                self._host_tensors[part, name] = host
            if not tensor.is_meta:
                host.copy_(tensor.detach(), non_blocking=True)
        return {name: self._host_tensors[part, name] for name in tensors}

    def _write(self, state, taken, saving_scope):
        """Write the checkpoint of `state`, with these tensors."""
        started, self.failure = time.monotonic(), f"the save of step {state.step} ended without a result"
        try:
            with saving_scope:
                if taken.copied is not None:
                    taken.copied.synchronize()
                path = retry_after_oom(
                    lambda: save_checkpoint(self._run_dir, state, taken.snapshot, self._keep, taken.drafts),
                    lambda: self._free_memory(state),
                )
        except (OSError, RuntimeError, MemoryError) as error:
            self._report_failure(state, error)
            return
        finally:
            for draft in taken.drafts.values():
                if not draft.done():
                    draft.set_result(None)
        self._saved_state, self.failure = state, ""
        self._journal.write(
            "save", step=state.step, path=str(path), bytes=taken.snapshot.bytes, snapshot_seconds=taken.seconds,
            write_seconds=time.monotonic() - started,
        )  # fmt: skip

    def _write_again(self, state, taken, previous):
        """Wait for the thread `previous`, then write `state` beside its step's tensors; if that fails, those too."""
        previous.join()
        if state == self._saved_state:
            return
        if self._saved_state is not None and self._saved_state.step == state.step:
            try:
                with saving():
                    save_state(self._run_dir, state)
                self._saved_state = state
                return
            except (OSError, ValueError, KeyError, RuntimeError, MemoryError) as error:  # its manifest may be damaged
                LOGGER.debug("the state of step %d is written with its tensors: %s", state.step, error)
        self._write(state, taken, saving())

    def _report_failure(self, state, error):
        self.failure = str(error)
        LOGGER.error(
            "no checkpoint of step %d: %s; earlier ones are intact, the next save tries again", state.step, error
        )
        self._journal.write("save", step=state.step, error=str(error))


def _lies_in_host_memory(model):
    """Whether what a checkpoint holds of the optimizer is in host memory already, and no part of it on other ranks."""
    return model.flat.is_offloaded and not model.flat.is_shared


def _copied():
    """CUDA event that marks the copies as done, or None on a CPU."""
    if not torch.cuda.is_initialized():
        return None
    copied = torch.cuda.Event()
    copied.record()  # the next update runs on this stream, so after the copies; only the thread waits
    return copied


def retry_after_oom(attempt, free_memory):
    """The result of `attempt()`. If it runs out of memory, call `free_memory()` and then `attempt()` once more."""
    fits, value = within_memory(attempt)
    if fits:
        return value
    LOGGER.warning("out of memory while saving: trying once more")
    free_memory()
    return attempt()


def try_export(model, tokenizer, directory, generation, facts, weights_files=(), base=None):
    """Export a model, or its adapter; returns the error message of a disk or memory error, "" on success.

    `weights_files` and `base` are export_model's; an adapter does not use the former.
    """
    args = model, tokenizer, directory, generation, facts
    args = (*args, base) if model.lora else (*args, weights_files, base)
    export = partial(export_adapter if model.lora else export_model, *args)
    try:
        retry_after_oom(export, release_memory)
    except (OSError, RuntimeError, MemoryError) as error:
        LOGGER.error("%s was not exported: %s", directory, error)
        return str(error)
    return ""


def check_equal_weights(ranks, model, step):
    """Raise RuntimeError on every rank if any bit of a weight differs between ranks."""
    own = checksum(model)
    largest, negated_smallest = vote(ranks, own, -own)
    if largest != -negated_smallest:
        checksums = gather_json(ranks, own)
        minority = [rank for rank, other in enumerate(checksums) if checksums.count(other) <= len(checksums) // 2]
        raise RuntimeError(
            f"the weights differ between ranks after step {step} (checksums {checksums}; suspect: ranks {minority}): a "
            "device or its memory gives wrong results; test the hardware, then resume from the last checkpoint with "
            "--is_keep_training=True"
        )


def checksum(model):
    """A number below 2^61 that changes when any single bit of the weights changes."""
    with torch.no_grad():
        total = sum(_sum_of_bits(flat) for flat in model.flat.weights)
    return int(total) % (2**61 - 1)  # divides no power of two, so every flipped bit shows


def _sum_of_bits(flat):
    """The bytes of a flat tensor, eight at a time, summed as int64: smaller words would be copied to int64 first."""
    data = flat.view(torch.uint8)
    whole = len(data) // 8 * 8
    rest = torch.cat([data[whole:], data.new_zeros(8)])[:8]
    return int(data[:whole].view(torch.int64).sum()) + int(rest.view(torch.int64))
