"""The run directory: what was asked for, whether a run may start in it, and the example ids of each step."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

import ujson

from config import FLAGS, TrainConfig, as_bool, load_config, preset_name
from model.checkpoint import checkpoint_paths
from model.durable import write_file


@dataclass(frozen=True)
class Request:
    """What a command line asks for."""

    preset: str
    config: TrainConfig
    given: dict  # options named on the command line, now or when the run was started
    keep_training: bool | str  # True, False, auto
    overwrite: bool


def read_request(stray, options, keep_training=False):
    """The Request of a command line; a run that goes on keeps the options it was started with.

    Raises ValueError for anything that cannot be obeyed, all of it at once.
    """
    given = {name: value for name, value in options.items() if name not in FLAGS}
    flags, preset, problems = _read_flags(stray, {name: options[name] for name in FLAGS if name in options})
    try:
        config = load_config(preset, given)
    except ValueError as error:
        problems += str(error).splitlines()[1:]
    if problems:
        raise ValueError("cannot run with these options:" + "".join(f"\n  {problem.strip()}" for problem in problems))
    keep, overwrite = flags.pop("is_keep_training", keep_training), flags.pop("overwrite", False)
    stored = _stored_request(config.output_dir) if keep else None
    if stored:
        if any(flags.values()) and stored[0] != preset:
            raise ValueError(
                f"{config.output_dir} is a run of the preset {stored[0]}, not {preset}: leave the flag out"
            )
        preset, given = stored[0], {**stored[1], **given}
        config = load_config(preset, given)
    return Request(preset, config, given, keep, overwrite)


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
    """(preset, options named on the command line) of the run in `run_dir`, or None when there is none."""
    path = Path(run_dir) / "config.json"
    if not path.exists():
        return None
    try:
        stored = ujson.loads(path.read_text(encoding="utf-8"))
        return str(stored["preset"]), dict(stored["given"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} cannot be read ({error}): delete it, and name the run's options again") from None


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
