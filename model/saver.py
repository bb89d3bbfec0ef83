"""What a run leaves on the disk while training goes on: checkpoints from a snapshot in host memory, and exports.

A disk that refuses costs a checkpoint and not the run: earlier checkpoints stay whole, and the next save tries again.
"""

import logging
import threading
import time

import torch

from model.checkpoint import Snapshot, save_checkpoint, snapshot_of
from model.export import export_model
from model.ranks import gather_json, vote

LOGGER = logging.getLogger("chat_trainer")


class Saver:
    """Writes a run's checkpoints on rank 0, one at a time on a thread; the journal hears how each went."""

    def __init__(self, ranks, run_dir, keep, journal):
        self._ranks, self._run_dir, self._keep, self._journal = ranks, run_dir, keep, journal
        self._host, self._thread = {}, None
        self.failure = ""  # of the newest save

    def save(self, state, model, optimizer):
        """Copy what a checkpoint holds and have it written; waits for the save before it.

        Raises RuntimeError on all ranks when their weights are not equal.
        """
        check_equal_weights(self._ranks, model, state.step)  # and every rank has written its example ids down
        if not self._ranks.is_main:
            return
        self.join()
        started = time.monotonic()
        try:
            live = snapshot_of(model, optimizer)
            snapshot = Snapshot(self._copy("weights", live.weights), self._copy("optimizer", live.optimizer))
            copied = torch.cuda.Event() if torch.cuda.is_initialized() else None
            if copied is not None:
                copied.record()  # the next step's changes come after the copies on this stream; only the thread waits
        except (RuntimeError, MemoryError) as error:
            self._host.clear()
            self._failed(state, error)
            return
        seconds = time.monotonic() - started
        # not a daemon: a process that ends for any other reason finishes this checkpoint first
        self._thread = threading.Thread(target=self._write, args=(state, snapshot, copied, seconds))
        self._thread.start()

    def join(self):
        """Wait until the last checkpoint is durable or has failed."""
        if self._thread is not None:
            self._thread.join()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.join()

    def _copy(self, part, tensors):
        """`tensors` in host memory that the next snapshot uses again, page-locked where a GPU writes it."""
        for name, tensor in tensors.items():
            host = self._host.get((part, name))
            if host is None or (host.shape, host.dtype) != (tensor.shape, tensor.dtype):
                host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                self._host[part, name] = host
            host.copy_(tensor.detach(), non_blocking=True)
        return {name: self._host[part, name] for name in tensors}

    def _write(self, state, snapshot, copied, snapshot_seconds):
        started = time.monotonic()
        try:
            if copied is not None:
                copied.synchronize()
            path = save_checkpoint(self._run_dir, state, snapshot, self._keep)
        except (OSError, RuntimeError, MemoryError) as error:
            self._failed(state, error)
            return
        self.failure = ""
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


def export_aloud(model, tokenizer, directory):
    """`export_model`, and why the disk or the memory refused it, or nothing."""
    try:
        export_model(model, tokenizer, directory)
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
    """A number of 62 bits that changes with any one bit of the weights."""
    with torch.no_grad():
        sums = [p.detach().flatten().view(torch.int16).sum(dtype=torch.int64) for p in model.parameters()]
        total = (torch.stack(sums) * torch.arange(1, 2 * len(sums), 2, device=sums[0].device)).sum()
    return int(total) & (2**62 - 1)
