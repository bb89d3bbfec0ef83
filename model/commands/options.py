"""Parses a command line and reports all its problems at once. Imports no torch and needs no GPU."""

import os
import re
import sys
from dataclasses import asdict, dataclass, fields, replace

from config import TrainConfig, default_learn_rate, rates_of
from model.commands.launcher_options import taken_over
from model.commands.option_names import unknown_option
from model.commands.option_values import as_bool, config_of_place, load_config, raise_if
from model.commands.run_files import FILE_OPTIONS
from model.commands.stored_options import ANOTHER_RUN, EXCLUSIVE, merge_options, stored_options
from model.commands.tested_models import without_models
from model.commands.usage import FLAGS, HELP, commands_text, usage, with_command
from model.display.catalogue import texts_here

RMS_FACTOR = 100  # learning rate of optimizers that scale updates by a tensor's RMS, over AdamW's, about
KEEP_TRAINING = dict(test=True, doctor="auto")  # test reads the run's options; doctor reads those that train would
PRESET_FLAGS = (
    "--is_finetune=True", "--use_small_config=True (fine-tuning)", "--use_fast_config=True (fine-tuning)",
    "--use_large_config=True (pre-training)",
)  # fmt: skip


@dataclass(frozen=True)
class CommandLine:
    """A parsed command line."""

    preset: str
    config: TrainConfig
    given: dict  # options given on the command line, now or when the run was started
    typed: frozenset  # names of the options on this command line
    keep_training: bool | str  # True, False, auto
    overwrite: bool
    changed: tuple = ()  # options that differ from the stored run's: "name before -> now"


def read_request(stray, options, keep_training=False):
    """The CommandLine of positional words `stray`, dict `options`; a resumed run keeps its stored options.

    `keep_training` is the command's default for is_keep_training. Raises one ValueError that lists every problem.
    """
    typed = parse_options(stray, options, keep_training)
    return with_stored_options(typed, stored_options(typed.config.output_dir, typed.keep_training, keep_training))


def parse_options(stray, options, keep_training=False):
    """The CommandLine without what a resumed run stored; reads no file and raises as `read_request`.

    If a run may go on, its config says only where the run lies: what is typed may need an option that is stored there.
    """
    given = {name: value for name, value in options.items() if name not in FLAGS}
    given = {name: value for name, value in given.items() if (name, value) != ("optimizer", "auto")}  # the default
    flags, preset, problems = _read_flags(stray, {name: options[name] for name in FLAGS if name in options})
    overwrite = flags.pop("overwrite", False)
    keep = False if overwrite else flags.get("is_keep_training", keep_training)
    names = {field.name for field in fields(TrainConfig)}
    problems += [unknown_option(name, [*names, *FLAGS]) for name in given if name not in names]
    try:
        read = config_of_place if keep else load_config
        config = read(preset, {name: value for name, value in given.items() if name in names})
    except ValueError as error:
        problems += str(error).splitlines()[1:]
    problems += _file_problems({name: given[name] for name in FILE_OPTIONS if name in given})
    problems += [
        f"--{one}={given[one]} and --{other}={given[other]}: give only one of them"
        for one, other in EXCLUSIVE
        if given.get(one) and given.get(other)
    ]
    raise_if(problems)
    if overwrite and flags.get("is_keep_training", keep_training) is True:
        raise ValueError("--is_keep_training=True resumes a run, --overwrite=True starts a new one: give only one")
    return CommandLine(preset, config, given, frozenset(given), keep, overwrite)


def _file_problems(given):
    """Messages about the names in the `given` options of FILE_OPTIONS; whether a file exists is not asked."""
    problems = []
    for name, text in given.items():
        try:
            if text:
                FILE_OPTIONS[name](str(text))
        except ValueError as error:
            # a line that goes on with the one before is indented further
            problems += [f"--{name}: {text.strip()}" for text in re.split(r"\n(?!    )", str(error))]
    return problems


def with_stored_options(request, stored):
    """`request` with its typed options applied to the `stored_options` of the resumed run, or to none.

    Raises ValueError if they contradict each other, or if a typed learning rate is outside the optimizer's range.
    """
    if not stored:
        request = replace(request, config=load_config(request.preset, request.given))
        if "learn_rate" in request.typed:
            check_learn_rate(request.config)
        return request
    run_dir, preset = request.config.output_dir, stored[0]
    if request.preset not in ("pretrain", preset):
        raise ValueError(
            f"{run_dir} is a run of the preset {preset}, not {request.preset}: to resume it, type "
            f"--output_dir={run_dir} in place of the preset's flag, {ANOTHER_RUN}"
        )
    given, config = merge_options(*stored, request.given)
    before, now = asdict(load_config(*stored)), asdict(config)
    if "learn_rate" in request.typed and before["learn_rate"] != config.learn_rate:
        check_learn_rate(config)
    changed = tuple(f"{name} {before[name]} -> {now[name]}" for name in now if before[name] != now[name])
    return replace(request, preset=preset, config=config, given=given, changed=changed)


def check_learn_rate(config):
    """Raise ValueError if the learning rate is outside the optimizer's range; the message says what to type instead.

    An optimizer that is not chosen yet takes any: `settled` asks again.
    """
    rate, name = config.learn_rate, config.optimizer
    if name == "auto":
        return
    *_, lowest, highest = rates_of(config)
    if config.any_learn_rate or lowest <= rate <= highest:
        return
    reason, other, equivalent = "", "muon and adamw_rms", rate / RMS_FACTOR
    if name != "adamw":
        reason = ", which it multiplies by the root mean square of each tensor"
        other, equivalent = "AdamW", rate * RMS_FACTOR
    hint = ""
    if lowest <= equivalent <= highest:
        hint = f"; {rate:g} of {other} is about {equivalent:g} here: type --learn_rate={equivalent:g}"
    raise ValueError(
        f"--learn_rate={rate:g}: {name} takes {lowest:g} to {highest:g}{reason}{hint}; leave it out for "
        f"{name}'s default {default_learn_rate(config):g}, or keep it with --any_learn_rate=True"
    )


def preset_name(is_finetune=False, use_small_config=False, use_fast_config=False, use_large_config=False):
    """Name of the preset that these flags choose; use_small_config and use_fast_config imply is_finetune.

    Raises ValueError if the flags contradict each other.
    """
    flags = dict(sft_small=use_small_config, sft_fast=use_fast_config, pretrain_large=use_large_config)
    chosen = [name for name, value in flags.items() if value]
    if len(chosen) > 1 or (use_large_config and is_finetune):
        values = (is_finetune, use_small_config, use_fast_config, use_large_config)
        given = " and ".join(text for text, value in zip(PRESET_FLAGS, values, strict=True) if value)
        raise ValueError(f"{given} contradict each other: give only one of them")
    return chosen[0] if chosen else "sft" if is_finetune else "pretrain"


def _read_flags(stray, texts):
    """(flag values, preset that they choose, problems) of the flags' `texts` and of the positional words `stray`."""
    problems = [f"cannot read {' '.join(map(str, stray))!r}: options are written --name=value"] if stray else []
    flags, preset = {}, "pretrain"
    for name, text in texts.items():
        try:
            flags[name] = text if (name, text) == ("is_keep_training", "auto") else as_bool(name, text)
        except ValueError as error:
            also = ", or auto (resume if there is a checkpoint)" if name == "is_keep_training" else ""
            problems.append(f"{error}{also}")
    try:
        preset = preset_name(**{name: flags[name] for name in flags.keys() - {"is_keep_training", "overwrite"}})
    except ValueError as error:
        problems.append(str(error))
    return flags, preset, problems


def command_line(argv):
    """The words of a command line: the command, its options, and those that accelerate's launcher was given instead.

    Raises ValueError as `with_command` and `taken_over`.
    """
    words = with_command(argv)
    return words if set(HELP) & set(words) else [*words, *taken_over(words)]


def exit_early(words):
    """Print the commands or options and exit if help is asked for; exit with code 2 if the command line has problems.

    A command line with options that are not written --name=value is left to the full parser.
    """
    is_main = os.environ.get("LOCAL_RANK", "0") == "0"  # every rank finds the same problems
    try:
        command, *rest = command_line(words)
        if asked := set(HELP) & {command, *rest}:
            if is_main:
                print(commands_text() if command in asked else usage(command))
            sys.exit(0)
        _check_early(command, without_models(command, rest))
        if is_main and (taken := [word for word in rest if word not in words]):
            print(texts_here()("launcher.taken", options=" ".join(taken)), file=sys.stderr)
    except ValueError as error:
        if is_main:
            from model.runtime.terminal import printable_lines

            print(printable_lines(str(error)), file=sys.stderr)
        sys.exit(2)


def _check_early(command, rest):
    """Raise ValueError if the options `rest`, if all are written --name=value, have problems."""
    pairs = [word[2:].split("=", 1) for word in rest if word.startswith("--") and "=" in word]
    stray = [word for word in rest if not word.startswith("-")]
    if command == "plan" or len(pairs) + len(stray) < len(rest):
        return
    options = {name.replace("-", "_"): value for name, value in pairs}
    # only rank 0's machine is sure to hold the run's directory; rank 0 reports problems with it once the ranks have met
    is_multi_node = os.environ.get("WORLD_SIZE", "1") != os.environ.get("LOCAL_WORLD_SIZE", "1")
    read = parse_options if is_multi_node else read_request
    read(stray, options, KEEP_TRAINING.get(command, False))
