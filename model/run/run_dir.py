"""The run directory: whether a run may start in it, its lock, and the example ids of each step."""

import contextlib
import fcntl
import logging
import os
import re
import shutil
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import ujson

from model.data.tokenizer import copy_tokenizer, load_tokenizer, tokenizer_files
from model.formats.adapters import keep_base
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
RUN_MARKERS = {"run.lock", "metrics.jsonl", "checkpoints"}  # each shows that a run worked here; models have config.json
RUN_OUTPUTS = re.compile(
    r"run\.lock|(config|plan|trackers|status_rank\w*)\.json|(metrics|samples_rank\w*)\.jsonl|terminal\.log|checkpoints|"
    r"best|last|tokenizer|base|plots|tensorboard|wandb"
)
IGNORED_NAMES = re.compile(r"\..*|lost\+found|tokenizer|.*\.(log|out|err|txt)")  # allowed before the first start


def admit(run_dir, keep_training, overwrite):
    """Name of the checkpoint in `run_dir` to resume from, "" to start a new run there.

    `keep_training` is True, False or "auto". Raises ValueError if the start would lose work, if there is no checkpoint
    to resume from, or if another run is using the directory.
    """
    check_name(run_dir)
    if Path(run_dir).exists():
        check_empty_or_run(Path(run_dir))
        check_links(Path(run_dir))
        with _os_error_as_value_error(run_dir), _lock(run_dir):
            put_back(run_dir)
            put_back(Path(run_dir) / "checkpoints")
    newest = _newest_name(run_dir)
    if newest and keep_training:
        return newest
    if keep_training is True:
        raise ValueError(
            f"--is_keep_training=True: there is no checkpoint in {run_dir}; name the run's directory in --output_dir, "
            "leave the option out to start a new run, or type --is_keep_training=auto to resume only if there is one"
        )
    if newest and not overwrite:
        raise ValueError(
            f"{run_dir} holds checkpoints, the newest {newest}: type --is_keep_training=True to resume from it, "
            "--overwrite=True to start a new run (the old one is moved aside), or another --output_dir to keep both"
        )
    return ""


def check_name(run_dir):
    """Raise ValueError if the name of `run_dir` is not UTF-8: safetensors cannot open files there."""
    try:
        str(run_dir).encode()
    except UnicodeEncodeError:
        raise ValueError(f"--output_dir={str(run_dir)!r}: its name is not UTF-8: name another directory") from None


def check_empty_or_run(run_dir):
    """Raise ValueError if `run_dir` holds files that are not those of a run."""
    with _os_error_as_value_error(run_dir):
        names = sorted(path.name for path in run_dir.iterdir() if not IGNORED_NAMES.fullmatch(path.name))
    if names and not RUN_MARKERS & set(names):
        raise ValueError(
            f"{run_dir} is not a run directory, it holds {', '.join(names[:3])}: name a run directory or an empty one "
            "in --output_dir"
        )


def is_run(folder):
    """Whether a run worked in `folder`."""
    return folder.is_dir() and bool(RUN_MARKERS & {path.name for path in folder.iterdir()})


def check_links(run_dir):
    """Raise ValueError if a file or directory that a run writes in `run_dir` is a link."""
    with _os_error_as_value_error(run_dir):
        outputs = [path for path in run_dir.iterdir() if RUN_OUTPUTS.fullmatch(path.name)]
        inner = [run_dir / "checkpoints" / "LATEST", *checkpoint_paths(run_dir)]
    check_no_link([*outputs, *inner])


@contextmanager
def only_writer(ranks, run_dir, admitted, overwrite, tokenizer, source=""):
    """Hold the lock of `run_dir` inside the block. Rank 0 calls `claim`; its ValueError is raised on every rank."""
    locks = []  # of rank 0; empty on the others
    from_main(ranks, lambda: locks.append(claim(run_dir, admitted, overwrite, tokenizer, source)))
    try:
        yield
    finally:
        for lock in locks:
            lock.close()


def claim(run_dir, admitted, overwrite, tokenizer, source=""):
    """Lock `run_dir` for this run; a new run first moves the old one aside.

    It also copies the tokenizer into `run_dir`, and the configurations of the model in `source` that it starts from:
    its exports have them. `admitted` is the result of `admit`. Returns the open lock file: other runs are refused until
    it is closed or the process dies. Raises ValueError if another run has used the directory since `admit`, or if the
    tokenizer has changed.
    """
    run_dir, tokenizer_dir = Path(run_dir), tokenizer.directory
    moves_old_run = overwrite and not admitted and run_dir.exists()
    tokenizer_files(tokenizer_dir)  # the exports to come copy them
    lock = _lock(run_dir)
    check_links(run_dir)
    newest = _newest_name(run_dir)
    if newest != admitted and not overwrite:
        raise ValueError(f"another run has used {run_dir} since this one started: start this one again")
    with ExitStack() as stack:
        kept = None if admitted else stack.enter_context(TemporaryDirectory())
        if kept:
            _keep_start(tokenizer, source, Path(kept))  # read before the old run, which may hold them, moves away
        if moves_old_run:
            lock.close()
            lock = _move_aside(run_dir, tokenizer_dir)
        for path in sorted(Path(kept).iterdir()) if kept else ():
            with whole_directory(run_dir / path.name) as draft:
                shutil.copytree(path, draft, dirs_exist_ok=True)
    return lock


def _keep_start(tokenizer, source, folder):
    """Copy to `folder` what a run's exports need of the tokenizer and of the model that it starts from."""
    copy_tokenizer(tokenizer.directory, folder / "tokenizer")
    if load_tokenizer(folder / "tokenizer").fingerprint != tokenizer.fingerprint:
        raise ValueError(f"the tokenizer in {tokenizer.directory} has changed since this run read it: start it again")
    if source:
        (folder / "base").mkdir()
        keep_base(source, folder / "base")


def _move_aside(run_dir, tokenizer_dir):
    """Rename the old run, and return the open lock file of a new directory in its place."""
    if Path(tokenizer_dir).resolve().is_relative_to(run_dir.resolve()):
        raise ValueError(
            f"--overwrite=True would move aside {tokenizer_dir}, the tokenizer that this run reads: copy it "
            "elsewhere and name the copy in --tokenizer_dir"
        )
    real = run_dir.resolve() if run_dir.is_symlink() else run_dir  # the link keeps its target
    old_run = f"{real}.{time.strftime('%Y%m%d_%H%M%S')}.old"
    os.rename(real, old_run)
    LOGGER.info("the old run is now %s: delete it when you no longer need it", old_run)
    return _lock(real)


def _newest_name(run_dir):
    return next((path.name for path in checkpoint_paths(run_dir)), "")


@contextmanager
def _os_error_as_value_error(run_dir):
    """Raise an OSError of the block as a ValueError that asks for another --output_dir."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{run_dir} cannot be written ({error}): name another --output_dir") from None


def _lock(run_dir):
    """The open run.lock, locked until it is closed or the process dies. Raises ValueError if another run holds it."""
    with _os_error_as_value_error(run_dir):
        make_directory(Path(run_dir))
        file = open_own(Path(run_dir) / "run.lock", "a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        raise ValueError(
            f"another run is using {run_dir} ({file.read().strip()}): wait until it ends, stop it, or name another "
            "--output_dir"
        ) from None
    with contextlib.suppress(OSError):  # on a full disk the lock works without the name in it
        file.truncate(0)
        file.write(f"process {os.getpid()} on {os.uname().nodename}")
        file.flush()
    return file


def is_exported(folder):
    """Whether best/ or last/ of a run has every file that loading it needs."""
    return bool(_exported(Path(folder)))


def has_last(run_dir):
    """Whether last/ was exported after the newest checkpoint was written."""
    weights, checkpoints = _exported(Path(run_dir, "last")), checkpoint_paths(run_dir)
    if not weights:
        return False
    exported = weights.with_name("tokenizer.json").stat().st_mtime  # the weights may be a link to a checkpoint's file
    return all(exported >= path.stat().st_mtime for path in checkpoints[:1])


def _exported(directory):
    """The file of weights in a directory that holds a whole model or adapter with its tokenizer, else None."""
    for config, weights in (("config.json", "model.safetensors"), ("adapter_config.json", "adapter_model.safetensors")):
        if all((directory / name).is_file() for name in (config, weights, "tokenizer.json")):
            return directory / weights
    return None


def cut_sample_ids_everywhere(ranks, run_dir, step):
    """Call `cut_sample_ids` once per machine; returns on all ranks after every machine is done."""
    from_main(ranks, cut_sample_ids, run_dir, step)
    if ranks.is_local_main and not ranks.is_main:
        cut_sample_ids(run_dir, step)
    vote(ranks, 0)


def cut_sample_ids(run_dir, step):
    """Remove the lines of steps after `step` from the samples files: a run that resumes at `step` writes them again.

    Raises ValueError for a line that no run writes.
    """
    for path in Path(run_dir).glob("samples_rank*.jsonl"):
        with open_own(path, "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # other machines may share the disk
            end = end_of_last_line(file)  # an incomplete last line is removed too
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
