"""What a run leaves on the disk while training goes on: checkpoints from a snapshot in host memory, and exports.

A disk that refuses costs a checkpoint and not the run: earlier checkpoints stay whole, and the next save tries again.
Where memory runs out the same save is tried again: the last one of a run has no next.
"""

import gc
import logging
import threading
import time
from contextlib import ExitStack

import torch

from model.nn.weights_io import export_model
from model.run.checkpoint import Snapshot, save_checkpoint, snapshot_of
from model.runtime.device_memory import is_out_of_memory, release_memory
from model.runtime.distributed import gather_json, vote
from model.runtime.watchdog import saving

LOGGER = logging.getLogger("chat_trainer")


class Saver:
    """Writes a run's checkpoints on rank 0, one at a time on a thread; the journal hears how each went."""

    def __init__(self, ranks, run_dir, keep, journal):
        self._ranks, self._run_dir, self._keep, self._journal = ranks, run_dir, keep, journal
        self._host, self._thread = {}, None
        self._saved = None  # the TrainState of the newest checkpoint
        self.failure = ""  # of the newest save

    def save(self, state, model, optimizer):
        """Copy what a checkpoint holds and have it written, if it is not yet; waits for the save before it.

        Raises RuntimeError on all ranks when their weights are not equal.
        """
        check_equal_weights(self._ranks, model, state.step)  # and every rank has written its example ids down
        if not self._ranks.is_main:
            return
        with saving():
            self.join()
        if state == self._saved:
            return
        with ExitStack() as until_written:
            until_written.enter_context(saving())
            self._begin(state, model, optimizer, until_written)

    def _begin(self, state, model, optimizer, until_written):
        """Take the snapshot and start the thread that writes it and then leaves `until_written`."""
        started = time.monotonic()
        try:
            snapshot, copied = retried(lambda: self._snapshot(model, optimizer), lambda: self._make_room(state))
        except (RuntimeError, MemoryError) as error:
            self._host.clear()
            self._failed(state, error)
            return
        seconds = time.monotonic() - started
        # not a daemon: a process that ends for any other reason finishes this checkpoint first
        held = until_written.pop_all()
        self._thread = threading.Thread(target=self._write, args=(state, snapshot, copied, seconds, held))
        self._thread.start()

    def join(self):
        """Wait until the last checkpoint is durable or has failed."""
        if self._thread is not None:
            self._thread.join()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.join()

    def _snapshot(self, model, optimizer):
        """(Snapshot in host memory, event after which it is there, or None on a CPU)."""
        live = snapshot_of(model, optimizer)
        snapshot = Snapshot(self._copy("weights", live.weights), self._copy("optimizer", live.optimizer))
        copied = torch.cuda.Event() if torch.cuda.is_initialized() else None
        if copied is not None:
            copied.record()  # the next step's changes come after the copies on this stream; only the thread waits
        return snapshot, copied

    def _make_room(self, state):
        """Journal that memory ran out in a save, and give back what is kept for the next one."""
        self._journal.write("oom", step=state.step, where="save", rank=0, before=None, after=None)
        self._host.clear()
        gc.collect()

    def _copy(self, part, tensors):
        """`tensors` in host memory that the next snapshot uses again, page-locked where a GPU writes it."""
        for name, tensor in tensors.items():
            host = self._host.get((part, name))
            if host is None or (host.shape, host.dtype) != (tensor.shape, tensor.dtype):
                host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                self._host[part, name] = host
            host.copy_(tensor.detach(), non_blocking=True)
        return {name: self._host[part, name] for name in tensors}

    def _write(self, state, snapshot, copied, snapshot_seconds, until_written):
        started = time.monotonic()
        with until_written:
            try:
                if copied is not None:
                    copied.synchronize()
                path = retried(
                    lambda: save_checkpoint(self._run_dir, state, snapshot, self._keep), lambda: self._make_room(state)
                )
            except (OSError, RuntimeError, MemoryError) as error:
                self._failed(state, error)
                return
        self._saved, self.failure = state, ""
        self._journal.write(
            "save", step=state.step, path=str(path), bytes=snapshot.bytes, snapshot_seconds=snapshot_seconds,
            write_seconds=time.monotonic() - started,
        )  # fmt: skip

    def _failed(self, state, error):
        self.failure = str(error)
        LOGGER.error(
            "no checkpoint of step %d: %s; earlier ones are whole, the next save tries again", state.step, error
        )
        self._journal.write("save", step=state.step, error=str(error))


def retried(attempt, make_room):
    """What `attempt()` gives; where memory runs out it is tried once more, after `make_room()`."""
    try:
        return attempt()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        LOGGER.warning("out of memory while saving (%s): trying once more", error)
    make_room()  # no longer inside the except block, which would hold the failed attempt's tensors
    return attempt()


def try_export(model, tokenizer, directory):
    """`export_model`, and why the disk or the memory refused it, or nothing."""
    device = model.shared.weight.device
    try:
        retried(lambda: export_model(model, tokenizer, directory), lambda: release_memory(device))
    except (OSError, RuntimeError, MemoryError) as error:
        LOGGER.error("no %s: %s", directory, error)
        return str(error)
    return ""


def check_equal_weights(ranks, model, step):
    """Raise RuntimeError on every rank when a bit of a weight differs between ranks."""
    mine = checksum(model)
    largest, smallest = vote(ranks, mine, -mine)
    if largest != -smallest:
        sums = gather_json(ranks, mine)
        odd = [rank for rank, other in enumerate(sums) if sums.count(other) <= len(sums) // 2]
        raise RuntimeError(
            f"the weights differ between ranks after step {step} (checksums {sums}; suspect: ranks {odd}): a device or "
            "its memory computes wrong; test them, and go on from the last checkpoint with --is_keep_training=True"
        )


def checksum(model):
    """A number below 2^61 that changes with any one bit of the weights."""
    with torch.no_grad():
        words = model.flat.masters.view(torch.int32)
        # 64 bits at a time: integers that are narrower than their sum are copied first, all of them
        total = words[: len(words) // 2 * 2].view(torch.int64).sum() + words[-1]  # which may have no neighbour
    return int(total) % (2**61 - 1)  # no power of two is a multiple
