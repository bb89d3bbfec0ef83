"""What a command line asks for, refused with all its problems at once. Needs neither torch nor a GPU."""

import os
import re
import sys
from dataclasses import asdict, dataclass, fields, replace
from inspect import getsource
from pathlib import Path

from config import FLAGS, LEARN_RATES, PRESETS, TrainConfig, as_bool, default_learn_rate, load_config, preset_name
from model.commands.option_names import unknown_option
from model.runtime.json_stream import read_object

COMMANDS = ("train", "plan", "test", "doctor")
RMS_FACTOR = 100  # about what rates that are multiplied by a tensor's root mean square are of AdamW's
KEEP_TRAINING = dict(test=True, doctor="auto")  # a test reads a run's options, a doctor those that a train would
ANOTHER_RUN = (
    "or start another run, without --is_keep_training=True: --output_dir=DIR keeps both, --overwrite=True moves this "
    "one aside"
)


KEPT = ("learn_rate", "warmup_steps")  # of a run that goes on, as config.json has them


@dataclass(frozen=True)
class Request:
    """What a command line asks for."""

    preset: str
    config: TrainConfig
    given: dict  # options named on the command line, now or when the run was started
    typed: frozenset  # names of those that were typed now
    keep_training: bool | str  # True, False, auto
    overwrite: bool
    changed: tuple = ()  # each option that the run had otherwise: "name before -> now"


def read_request(stray, options, keep_training=False):
    """The Request of a command line; a run that goes on keeps the options it was started with.

    Raises ValueError for anything that cannot be obeyed, all of it at once.
    """
    words = read_words(stray, options, keep_training)
    return going_on(words, stored_options(words.config.output_dir, words.keep_training, keep_training))


def read_words(stray, options, keep_training=False):
    """The Request of the words alone, which reads no file; raises as `read_request`."""
    given = {name: value for name, value in options.items() if name not in FLAGS}
    flags, preset, problems = _read_flags(stray, {name: options[name] for name in FLAGS if name in options})
    names = {field.name for field in fields(TrainConfig)}
    problems += [unknown_option(name, [*names, *FLAGS]) for name in given if name not in names]
    try:
        config = load_config(preset, {name: value for name, value in given.items() if name in names})
    except ValueError as error:
        problems += str(error).splitlines()[1:]
    if problems:
        raise ValueError("cannot run with these options:" + "".join(f"\n  {problem.strip()}" for problem in problems))
    keep, overwrite = flags.pop("is_keep_training", keep_training), flags.pop("overwrite", False)
    if overwrite and keep is True:
        raise ValueError("--is_keep_training=True goes on and --overwrite=True starts afresh: give one of them")
    return Request(preset, config, given, frozenset(given), False if overwrite else keep, overwrite)


def stored_options(run_dir, keep, keep_training=False):
    """(preset, options named on the command line) of the run in `run_dir` that goes on, or None.

    `keep` is a Request's keep_training, `keep_training` the command's own.
    """
    # what a run that never came to a checkpoint was asked for is forgotten
    goes_on = keep and (keep_training is True or _has_checkpoint(Path(run_dir, "checkpoints")))
    return _stored_request(run_dir) if goes_on else None


def going_on(words, stored):
    """The Request of `words` on top of the `stored_options` of the run that goes on, where there is one."""
    if not stored:
        if "learn_rate" in words.typed:
            _check_learn_rate(words.config)
        return words
    run_dir, preset = words.config.output_dir, stored[0]
    if words.preset not in ("pretrain", preset):
        raise ValueError(
            f"{run_dir} is a run of the preset {preset}, not {words.preset}: to go on with it, type "
            f"--output_dir={run_dir} in place of the preset's flag, {ANOTHER_RUN}"
        )
    given = _merged(*stored, words.given)
    config = load_config(preset, given)
    before, now = asdict(load_config(*stored)), asdict(config)
    if "learn_rate" in words.typed and before["learn_rate"] != config.learn_rate:
        _check_learn_rate(config)
    changed = tuple(f"{name} {before[name]} -> {now[name]}" for name in now if before[name] != now[name])
    return replace(words, preset=preset, config=config, given=given, changed=changed)


def _has_checkpoint(folder):
    return any(any(folder.glob(form)) for form in ("step_*", ".step_*.aside"))  # the latter is put back at the start


def _merged(preset, stored, typed):
    """The options of a run with those `typed` now on top.

    Raises ValueError where it would have had to begin from other weights, or have the state of another optimizer.
    """
    began, start = load_config(preset, stored).finetune_from_ckp_file, typed.get("finetune_from_ckp_file")
    if start is not None and Path(start).resolve() != Path(began).resolve():
        raise ValueError(
            f"--finetune_from_ckp_file={start}: this run began from {began or 'chance'!r} and goes on: leave it out, "
            f"{ANOTHER_RUN}"
        )
    before, now = (asdict(load_config(preset, given)) for given in (stored, stored | typed))
    for name in ("optimizer", "trainable"):
        if before[name] != now[name]:
            raise ValueError(
                f"--{name}={now[name]}: this run goes on with {before[name]}, as its optimizer's state needs: "
                f"leave it out, {ANOTHER_RUN}"
            )
    if any(before[name] != now[name] for name in ("batch_size_per_gpu", "gradient_accumulation_steps")):
        stored = {name: value for name, value in stored.items() if name != "global_batch_size"}  # it is chosen anew
    return stored | typed


def _check_learn_rate(config):
    """Raise ValueError where the learning rate is outside the optimizer's range, with what to type instead."""
    rate, name = config.learn_rate, config.optimizer
    *_, least, most = LEARN_RATES[name]
    if config.any_learn_rate or least <= rate <= most:
        return
    why, whose, equivalent = "", "muon and adamw_rms", rate / RMS_FACTOR
    if name != "adamw":
        why = ", which it multiplies by the root mean square of each tensor"
        whose, equivalent = "AdamW", rate * RMS_FACTOR
    near = f"; what is {rate:g} for {whose} is about {equivalent:g} here: type --learn_rate={equivalent:g}"
    raise ValueError(
        f"--learn_rate={rate:g}: {name} takes {least:g} to {most:g}{why}{near if least <= equivalent <= most else ''}; "
        f"leave it out for {name}'s own {default_learn_rate(config):g}, or insist with --any_learn_rate=True"
    )


def _read_flags(stray, texts):
    """(values of the flags, the preset they choose, what is wrong with them and with words that are no options)."""
    problems = [f"cannot read {' '.join(map(str, stray))!r}: options are written --name=value"] if stray else []
    flags, preset = {}, "pretrain"
    for name, text in texts.items():
        try:
            flags[name] = text if (name, text) == ("is_keep_training", "auto") else as_bool(name, text)
        except ValueError as error:
            problems.append(str(error))
    try:
        preset = preset_name(**{name: flags[name] for name in flags.keys() - {"is_keep_training", "overwrite"}})
    except ValueError as error:
        problems.append(str(error))
    return flags, preset, problems


def _stored_request(run_dir):
    """(preset, options named on the command line) of the run in `run_dir`, or None when there is none.

    The run is where its directory lies now: the output_dir that it was started with does not count.
    """
    path = Path(run_dir) / "config.json"
    if not path.exists():
        return None
    stored = {}
    try:
        stored = read_object(path)
        # the run's own numbers also where its options left them to defaults, which may be others by now
        kept = {name: stored["config"][name] for name in KEPT if name in stored.get("config", {})}
        preset, given = stored["preset"], stored["given"] | kept
        if preset not in PRESETS or not all(isinstance(value, str | int | float) for value in given.values()):
            raise ValueError(f"preset {preset!r} with {given!r}")
        return preset, given | dict(output_dir=run_dir)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if "architectures" in stored:
            raise ValueError(
                f"--output_dir={run_dir} is an exported model: name the run's directory above it"
            ) from None
        raise ValueError(f"{path} cannot be read ({error}): delete it, and name the run's options again") from None


def answer_early(words):
    """Exit with a command's options where --help asks for them, and with code 2 where a command line cannot be obeyed.

    One with options that are not written --name=value passes.
    """
    command, *rest = words or [""]
    if command in COMMANDS and {"-h", "--help"} & set(rest):
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(usage(command))
        sys.exit(0)
    pairs = [word[2:].split("=", 1) for word in rest if word.startswith("--") and "=" in word]
    stray = [word for word in rest if not word.startswith("-")]
    if command not in COMMANDS or command == "plan" or len(pairs) + len(stray) < len(rest):
        return
    options = {name.replace("-", "_"): value for name, value in pairs}
    options.pop("local_rank", None)
    # other machines cannot see the run's directory: what is wrong with it they hear when the ranks meet
    several_machines = os.environ.get("WORLD_SIZE", "1") != os.environ.get("LOCAL_WORLD_SIZE", "1")
    read = read_words if several_machines else read_request
    try:
        read(stray, options, KEEP_TRAINING.get(command, False))
    except ValueError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":  # every rank finds the same fault
            from model.runtime.terminal import printable_lines

            print(printable_lines(str(error)), file=sys.stderr)
        sys.exit(2)


def usage(command):
    """What can be typed after `command`: each option with its default and what config.py says of it."""
    said = dict(re.findall(r"^    (\w+): \w+ = .*?  # (.*)$", getsource(TrainConfig), re.MULTILINE))
    options = (f"  --{f.name}={f.default}".ljust(48) + said[f.name] for f in fields(TrainConfig))
    flags = " ".join(f"--{name}=True" for name in FLAGS)
    plan_too = "\n  --num_processes=N --vocab_size=N: of a machine and a tokenizer not here; --json=True: for programs"
    return "\n".join([
        f"usage: python train_low_mem.py {command} [--name=value ...]", *options,
        f"  {flags}: README.md" + (plan_too if command == "plan" else ""),
    ])  # fmt: skip
