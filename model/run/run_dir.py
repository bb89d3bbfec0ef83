"""The run directory: whether a run may start in it, and the example ids of each step."""

import contextlib
import fcntl
import logging
import os
import re
import time
from contextlib import contextmanager
from pathlib import Path

import ujson

from model.data.tokenizer import copy_tokenizer, tokenizer_files
from model.run.checkpoint import checkpoint_paths
from model.runtime.atomic_io import (
    check_no_link,
    end_of_last_line,
    make_directory,
    open_own,
    put_back,
    whole_directory,
)
from model.runtime.distributed import from_main, vote

TOKENIZER_DIR, TOKENS_DIR = "model_save/tokenizer", "model_save/tokens"

LOGGER = logging.getLogger("chat_trainer")
RUN_FILES = {"run.lock", "metrics.jsonl", "checkpoints"}  # a config.json may be a model's
WRITTEN = re.compile(
    r"run\.lock|(config|plan)\.json|(metrics|samples_rank\w*)\.jsonl|checkpoints|best|last|tokenizer|plots"
)
MAY_STAND_THERE = re.compile(r"\..*|lost\+found|tokenizer|.*\.(log|out|err|txt)")  # before a run's first start


def admit(run_dir, keep_training, overwrite):
    """Name of the checkpoint to go on from in `run_dir`, "" to start afresh there.

    `keep_training` is True, False or "auto". Raises ValueError where a start would lose work, there is nothing to go on
    from, or another run is at work.
    """
    check_name(run_dir)
    if Path(run_dir).exists():
        check_no_stranger(Path(run_dir))
        check_own_files(Path(run_dir))
        with _refusing(run_dir), _lock(run_dir):
            put_back(run_dir)
            put_back(Path(run_dir) / "checkpoints")
    newest = _newest_name(run_dir)
    if newest and keep_training:
        return newest
    if keep_training is True:
        raise ValueError(
            f"--is_keep_training=True: there is no checkpoint in {run_dir}; name the run's directory in --output_dir, "
            "start without it, or type --is_keep_training=auto to go on where there is one"
        )
    if newest and not overwrite:
        raise ValueError(
            f"{run_dir} holds checkpoints, the newest {newest}: type --is_keep_training=True to go on from it, "
            "--overwrite=True to start afresh (the old run is moved aside), or another --output_dir to keep both"
        )
    return ""


def check_name(run_dir):
    """Raise ValueError where `run_dir` has a name that is not UTF-8: safetensors opens no file there."""
    try:
        str(run_dir).encode()
    except UnicodeEncodeError:
        raise ValueError(f"--output_dir={str(run_dir)!r}: its name is not UTF-8: name another directory") from None


def check_no_stranger(run_dir):
    """Raise ValueError where `run_dir` holds files and no run has ever been at work there."""
    with _refusing(run_dir):
        names = sorted(path.name for path in run_dir.iterdir() if not MAY_STAND_THERE.fullmatch(path.name))
    if names and not RUN_FILES & set(names):
        raise ValueError(
            f"{run_dir} is no run's directory, it holds {', '.join(names[:3])}: name another or an empty --output_dir"
        )


def check_own_files(run_dir):
    """Raise ValueError where a link stands in `run_dir` in the place of something that a run writes."""
    with _refusing(run_dir):
        own = [path for path in run_dir.iterdir() if WRITTEN.fullmatch(path.name)]
        inner = [run_dir / "checkpoints" / "LATEST", *checkpoint_paths(run_dir)]
    check_no_link([*own, *inner])


@contextmanager
def only_writer(ranks, run_dir, admitted, overwrite, tokenizer_dir):
    """Inside, no other run may work in `run_dir`; rank 0 claims it, and the ValueError of `claim` is every rank's."""
    held = []
    from_main(ranks, lambda: held.append(claim(run_dir, admitted, overwrite, tokenizer_dir)))
    try:
        yield
    finally:
        for lock in held:
            lock.close()


def claim(run_dir, admitted, overwrite, tokenizer_dir):
    """Make `run_dir` this run's alone, as `admit` said, with its tokenizer in it; the old run is moved aside first.

    Returns an open file: other runs are kept out until it is closed or the process dies. Raises ValueError when another
    run was faster.
    """
    run_dir = Path(run_dir)
    moves = overwrite and not admitted and run_dir.exists()
    tokenizer_files(tokenizer_dir)  # the exports to come copy them
    lock = _lock(run_dir)
    check_own_files(run_dir)
    newest = _newest_name(run_dir)
    if newest != admitted and not overwrite:
        raise ValueError(f"another run has been at work in {run_dir} since this one started: start again")
    if moves:
        if Path(tokenizer_dir).resolve().is_relative_to(run_dir.resolve()):
            raise ValueError(
                f"--overwrite=True would move the tokenizer aside that this run reads, {tokenizer_dir}: copy it "
                "elsewhere and name it in --tokenizer_dir"
            )
        lock.close()
        real = run_dir.resolve() if run_dir.is_symlink() else run_dir  # a link goes on leading to the same disk
        aside = f"{real}.{time.strftime('%Y%m%d_%H%M%S')}.old"
        os.rename(real, aside)
        LOGGER.info("the old run is now %s: delete it when you no longer need it", aside)
        lock = _lock(real)
    if not admitted:
        with whole_directory(run_dir / "tokenizer") as draft:
            copy_tokenizer(tokenizer_dir, draft)
    return lock


def _newest_name(run_dir):
    return next((path.name for path in checkpoint_paths(run_dir)), "")


@contextmanager
def _refusing(run_dir):
    """What the disk says against `run_dir` is a ValueError."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{run_dir} cannot be written ({error}): name another --output_dir") from None


def _lock(run_dir):
    """run.lock, open and locked; the system frees it when its holder dies. Raises ValueError if another holds it."""
    with _refusing(run_dir):
        make_directory(Path(run_dir))
        file = open_own(Path(run_dir) / "run.lock", "a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        raise ValueError(
            f"another run is at work in {run_dir} ({file.read().strip()}): wait for it, stop it, or name another "
            "--output_dir"
        ) from None
    with contextlib.suppress(OSError):  # a full disk: the lock holds without a name
        file.truncate(0)
        file.write(f"process {os.getpid()} on {os.uname().nodename}")
        file.flush()
    return file


def has_best(run_dir):
    """Whether a best/ is there that can be read."""
    return all(Path(run_dir, "best", name).is_file() for name in ("config.json", "model.safetensors", "tokenizer.json"))


def has_last(run_dir):
    """Whether last/ was exported after the newest checkpoint was written."""
    weights, checkpoints = Path(run_dir, "last", "model.safetensors"), checkpoint_paths(run_dir)
    return weights.exists() and all(weights.stat().st_mtime >= path.stat().st_mtime for path in checkpoints[:1])


def cut_sample_ids_everywhere(ranks, run_dir, step):
    """`cut_sample_ids` on each machine's disk; no rank goes on before it is done."""
    from_main(ranks, cut_sample_ids, run_dir, step)
    if ranks.is_local_main and not ranks.is_main:
        cut_sample_ids(run_dir, step)
    vote(ranks, 0)


def cut_sample_ids(run_dir, step):
    """Drop from the samples files what a resume at `step` is about to do again."""
    for path in Path(run_dir).glob("samples_rank*.jsonl"):
        with open_own(path, "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # another machine may work on the same disk
            end = end_of_last_line(file)  # a torn last line goes too
            while end:
                start = end_of_last_line(file, end - 1)
                file.seek(start)
                if _step_of(file.read(end - start), path) <= step:
                    break
                end = start
            file.truncate(end)


def _step_of(line, path):
    try:
        return int(ujson.loads(line)["step"])
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise ValueError(f"{path} has a line that no run writes ({error!r:.100}): delete the file") from None
