"""The run directory: whether a run may start in it, and the example ids of each step."""

import os
import time
from pathlib import Path

import ujson

from model.checkpoint import checkpoint_paths
from model.durable import write_file


def write_json(path, values):
    """Write `values` (plain values) as readable JSON, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, ujson.dumps(values, indent=1, ensure_ascii=False, escape_forward_slashes=False).encode())


def admit(run_dir, keep_training, overwrite):
    """True to go on from a checkpoint in `run_dir`, False to start afresh there.

    `keep_training` is True, False or "auto". Raises ValueError where a start would lose work or there is nothing to
    go on from.
    """
    found = checkpoint_paths(run_dir)
    if found and keep_training:
        return True
    if keep_training is True:
        raise ValueError(
            f"--is_keep_training=True: there is no checkpoint in {run_dir}; start without it, or type "
            "--is_keep_training=auto to go on where there is one"
        )
    if found and not overwrite:
        raise ValueError(
            f"{run_dir} holds checkpoints, the newest {found[0].name}: type --is_keep_training=True to go on from it, "
            "or --overwrite=True to start afresh (the old run is moved aside)"
        )
    if overwrite and Path(run_dir).exists():
        os.rename(run_dir, f"{str(run_dir).rstrip('/')}.{time.strftime('%Y%m%d_%H%M%S')}.old")
    return False


def cut_sample_ids(run_dir, step):
    """Drop from the samples files what a resume at `step` is about to do again."""
    for path in Path(run_dir).glob("samples_rank*.jsonl"):
        lines = path.read_bytes().split(b"\n")[:-1]  # a torn last line goes too
        kept = [line for line in lines if ujson.loads(line)["step"] <= step]
        write_file(path, b"".join(line + b"\n" for line in kept))


def append_sample_ids(run_dir, rank, result):
    """Write which examples (rows of the token store) this rank's part of a step was made of."""
    line = ujson.dumps(dict(step=result.step, epoch=result.epoch, ids=result.ids))
    with open(Path(run_dir) / f"samples_rank{rank}.jsonl", "a") as file:
        file.write(line + "\n")
