"""The command that started this process, its launcher included, and the one that goes on with its run.

Standard library only.
"""

import functools
import os
import shlex
import shutil
import sys
from pathlib import Path

LAUNCHERS = {"accelerate", "accelerate-launch", "torchrun"}
LAUNCHERS |= {"accelerate.commands.launch", "accelerate.commands.accelerate_cli"}
LAUNCHERS |= {"torch.distributed.run", "torch.distributed.launch"}
LAST_PLACE = 4  # of a launcher's name among the words: it follows python and few options of python's
NEW_RUN = ("--overwrite", "--is_keep_training")  # options that a run which goes on is given anew
SCRIPT = "train_low_mem.py"


@functools.cache
def launcher_words():
    """The words typed to accelerate's or torch's launcher, the script's name last; () if neither started this process.

    They are found by the parents of this process, as long as these live.
    """
    if not {"WORLD_SIZE", "ACCELERATE_MIXED_PRECISION"} & set(os.environ):
        return ()
    pid = os.getppid()
    while pid > 1:
        words, pid = _process(pid)
        if any(Path(word).name in LAUNCHERS for word in words[:LAST_PLACE]):
            return _up_to_script(words)
    return ()


def _process(pid):
    """(words of a process's command line, number of its parent); ((), 0) if it is gone."""
    try:
        words = os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes()).split("\0")[:-1]
        parent = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1]
    except (OSError, IndexError):
        return (), 0
    return tuple(words), int(parent)


def _up_to_script(words):
    """The words up to the name of the script that is launched; all if none is found."""
    names = (Path(SCRIPT).stem, *(word for word in words if word.endswith(".py")))
    places = [place for place, word in enumerate(words) if word in names]
    return words[: places[0] + 1] if places else words


def launcher_options():
    """{name: value} of the options typed to the launcher, with _ for -; True for one without a value."""
    return read_options(launcher_words())


def read_options(words):
    """{name: value} of the words --name=value and --name value, with _ for -; "True" for a name without a value."""
    found = {}
    for word, after in zip(words, (*words[1:], "--"), strict=False):
        if word.startswith("--"):
            name, is_given, value = word[2:].partition("=")
            found[name.replace("-", "_")] = value if is_given else "True" if after.startswith("--") else after
    return found


def typed_command():
    """The words that were typed to start this process, as CHAT_COMMAND says them or as the launcher and Python do."""
    return shlex.split(os.environ.get("CHAT_COMMAND", "")) or [*_program(), *sys.argv[1:]]


def command_to_go_on(run_dir):
    """A command line that goes on with the run in `run_dir`, with the launcher that this process was started by."""
    if "CHAT_COMMAND" in os.environ:  # of a script that goes on where it can
        words = _without_new_run(typed_command())
    else:
        words = [*_program(), "train", f"--output_dir={run_dir}", "--is_keep_training=True"]
    devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    if devices is not None and "gpu_ids" not in launcher_options():
        words = [f"CUDA_VISIBLE_DEVICES={devices}", *words]
    return shlex.join(words)


def _program():
    """Words of the launcher, or of Python and its options, and the script."""
    if words := launcher_words():
        return _shortened(words)
    words = sys.orig_argv[: len(sys.orig_argv) - len(sys.argv) + 1]
    is_script = words and Path(words[-1]).stem in (Path(SCRIPT).stem, Path(sys.argv[0]).stem)
    return words if is_script else ["python", SCRIPT]


def _shortened(words):
    """`words` without Python where the shell finds the launcher by its name."""
    python, program, *rest = words
    name = Path(program).name
    found = shutil.which(name) if name in LAUNCHERS else None
    return [name, *rest] if found and os.path.samefile(found, program) else [python, program, *rest]


def _without_new_run(words):
    """`words` without the options that start a new run and their values."""
    kept, skips = [], False
    for word in words:
        is_value, skips = skips and not word.startswith("-"), False
        if word.replace("-", "_").startswith(tuple(name.replace("-", "_") for name in NEW_RUN)):
            skips = "=" not in word
        elif not is_value:
            kept.append(word)
    return kept
