"""The commands of train_low_mem.py and their help. Imports no torch and needs no GPU."""

import os
import re
from dataclasses import fields
from difflib import get_close_matches
from inspect import getsource

from config import TrainConfig
from model.commands.help_zh import HELP_ZH
from model.display.catalogue import language_of, texts_here

FLAGS = ("is_keep_training", "is_finetune", "use_small_config", "use_fast_config", "use_large_config", "overwrite")
COMMANDS = ("train", "plan", "test", "doctor")
HELP = ("-h", "--help")


def with_command(argv):
    """The words of a command line without those of old launchers; options without a command are those of train.

    Raises ValueError, with the commands, if there is no word or the first is none of them.
    """
    words = [word for word in argv if not word.startswith(("--local_rank", "--local-rank"))]
    if not words:
        raise ValueError(texts_here()("usage.none", commands=commands_text()))
    first = words[0]
    if first in COMMANDS or first in HELP:
        return words
    if first.startswith("--"):
        return ["train", *words]
    similar = get_close_matches(first, COMMANDS, n=1)
    hint = texts_here()("usage.similar", command=similar[0]) if similar else ""
    raise ValueError(texts_here()("usage.unknown", word=first, hint=hint, commands=commands_text()))


def commands_text():
    """Help text of all commands, each in a line."""
    return texts_here()("usage.commands")


def usage(command):
    """Help text of `command`: each option with its default and its comment in config.py, or that in Chinese."""
    language, text = language_of(os.environ), texts_here()
    comments = dict(re.findall(r"^    (\w+): \w+ = .*?  # (.*)$", getsource(TrainConfig), re.MULTILINE))
    comments = HELP_ZH if language == "zh" else comments
    options = (f"  --{f.name}={f.default}".ljust(48) + comments[f.name] for f in fields(TrainConfig))
    flags = " ".join(f"--{name}=True" for name in FLAGS)
    own = [text(f"usage.{command}")] if command in ("plan", "test") else []
    return "\n".join([text("usage", command=command), *options, text("usage.flags", flags=flags), *own])
