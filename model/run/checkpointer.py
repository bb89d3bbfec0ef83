"""Saves checkpoints from a snapshot in host memory while training goes on, and exports models.

A disk error costs one checkpoint, not the run: earlier checkpoints stay intact and the next save tries again. After an
out-of-memory error the same save is tried again, because the last save of a run has no next one.
"""

import gc
import logging
import threading
import time
from contextlib import ExitStack

import torch

from model.nn.adapter_io import export_adapter
from model.nn.weights_io import export_model
from model.run.checkpoint import Snapshot, save_checkpoint, save_state, snapshot_of
from model.runtime.device_memory import release_memory, within_memory
from model.runtime.distributed import gather_json, vote
from model.runtime.watchdog import saving

LOGGER = logging.getLogger("chat_trainer")


class Saver:
    """Writes the checkpoints of a run on rank 0, one at a time, on a thread. Journals the outcome of each save."""

    def __init__(self, ranks, run_dir, keep, journal):
        self._ranks, self._run_dir, self._keep, self._journal = ranks, run_dir, keep, journal
        self._host_tensors, self._thread = {}, None
        self._saved_state = None  # the TrainState of the newest checkpoint
        self.failure = ""  # error message of the newest save; empty if it succeeded

    def save(self, state, model, optimizer):
        """Copy weights and optimizer state and start to write them, unless the checkpoint of `state` exists already.

        After an evaluation, which changes only the state of a step that is saved, only the state is written.

        Waits for the previous save. Raises RuntimeError on all ranks if the weights differ between ranks.
        """
        check_equal_weights(self._ranks, model, state.step)  # its vote also waits until all ranks wrote their ids
        if not self._ranks.is_main:
            return
        with saving():
            self.join()
        if state == self._saved_state or self._rewrites_state(state):
            return
        with ExitStack() as saving_scope:
            saving_scope.enter_context(saving())
            self._start(state, model, optimizer, saving_scope)

    def _rewrites_state(self, state):
        """Write the state of a step whose tensors are saved already; False if they are not or the disk refuses it."""
        if self._saved_state is None or self._saved_state.step != state.step:
            return False
        try:
            with saving():
                save_state(self._run_dir, state)
        except (OSError, ValueError) as error:
            LOGGER.debug("the state of step %d is written with its tensors: %s", state.step, error)
            return False
        self._saved_state = state
        return True

    def _start(self, state, model, optimizer, saving_scope):
        """Take the snapshot and start the thread that writes it; that thread then closes `saving_scope`."""
        started = time.monotonic()
        try:
            snapshot, copied = retry_after_oom(
                lambda: self._snapshot(model, optimizer), lambda: self._free_memory(state)
            )
        except (RuntimeError, MemoryError) as error:
            self._host_tensors.clear()
            self._report_failure(state, error)
            return
        snapshot_seconds = time.monotonic() - started
        args = (state, snapshot, copied, snapshot_seconds, saving_scope.pop_all())
        self._thread = threading.Thread(target=self._write, args=args)  # not a daemon: exit waits for the checkpoint
        self._thread.start()

    def join(self):
        """Wait until the last checkpoint is on the disk or has failed."""
        if self._thread is not None:
            self._thread.join()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.join()

    def _snapshot(self, model, optimizer):
        """(Snapshot in host memory, CUDA event that marks the copies as done, or None on a CPU)."""
        source = snapshot_of(model, optimizer)
        snapshot = Snapshot(self._copy("weights", source.weights), self._copy("optimizer", source.optimizer))
        copied = torch.cuda.Event() if torch.cuda.is_initialized() else None
        if copied is not None:
            copied.record()  # the next update runs on this stream, so after the copies; only the thread waits
        return snapshot, copied

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
                host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                self._host_tensors[part, name] = host
            host.copy_(tensor.detach(), non_blocking=True)
        return {name: self._host_tensors[part, name] for name in tensors}

    def _write(self, state, snapshot, copied, snapshot_seconds, saving_scope):
        started = time.monotonic()
        with saving_scope:
            try:
                if copied is not None:
                    copied.synchronize()
                path = retry_after_oom(
                    lambda: save_checkpoint(self._run_dir, state, snapshot, self._keep),
                    lambda: self._free_memory(state),
                )
            except (OSError, RuntimeError, MemoryError) as error:
                self._report_failure(state, error)
                return
        self._saved_state, self.failure = state, ""
        self._journal.write(
            "save", step=state.step, path=str(path), bytes=snapshot.bytes, snapshot_seconds=snapshot_seconds,
            write_seconds=time.monotonic() - started,
        )  # fmt: skip

    def _report_failure(self, state, error):
        self.failure = str(error)
        LOGGER.error(
            "no checkpoint of step %d: %s; earlier ones are intact, the next save tries again", state.step, error
        )
        self._journal.write("save", step=state.step, error=str(error))


def retry_after_oom(attempt, free_memory):
    """The result of `attempt()`. If it runs out of memory, call `free_memory()` and then `attempt()` once more."""
    fits, value = within_memory(attempt)
    if fits:
        return value
    LOGGER.warning("out of memory while saving: trying once more")
    free_memory()
    return attempt()


def try_export(model, tokenizer, directory, generation, facts):
    """Export a model, or its adapter; returns the error message of a disk or memory error, "" on success."""
    export = export_adapter if model.lora else export_model
    try:
        retry_after_oom(lambda: export(model, tokenizer, directory, generation, facts), release_memory)
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
