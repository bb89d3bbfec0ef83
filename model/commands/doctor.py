"""The command `doctor`: checks machine, data and options for a run; a table with a remedy for each problem."""

import locale
import os
import re
import shutil
import subprocess
import sys
import tomllib
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from packaging.requirements import Requirement

from model.commands.data_rows import data_rows
from model.commands.expected_time import card, expected_text
from model.commands.length_sample import sample_of
from model.commands.machine import machine_here
from model.commands.network import draft_model
from model.commands.origin import find_origin
from model.commands.plan_report import memory_here, predict
from model.commands.recipe import resolve
from model.commands.run_data import source_of
from model.commands.run_files import files_of, train_files, train_option
from model.commands.same_run import check_same_run
from model.commands.setup import new_state
from model.commands.space import Row, disk_row, memory_rows, output_dir_row, shared_memory_row
from model.data.sampler import mixture_of
from model.data.token_store import find_store
from model.display.catalogue import texts_here
from model.display.console import padded
from model.display.view import count_of
from model.memory.plan import NothingFits
from model.run.checkpoint import checkpoint_paths, load_newest
from model.run.run_dir import TOKENS_DIR
from model.run.train_state import LaterFormat
from model.runtime.cgroup import num_cpus
from model.runtime.distributed import ALONE
from model.runtime.launch import must_use_cpu
from model.runtime.nccl_check import find_backend, in_words, try_backend

GIB = 2**30
ROOT = Path(__file__).resolve().parents[2]


def examine(config, typed=(), overwrite=False):
    """Yield a Row for each check of this machine, the data and `config`; `typed` as in prepare_run.

    With `overwrite` the checkpoints in output_dir are ignored, as a run would move them aside.
    """
    yield from _packages()
    yield from _gpus(config.backend)
    yield from _links()
    yield _cores()
    yield shared_memory_row()
    yield _locale()
    yield from _round_trips()
    recipe, tokenizer, rows = model_rows(config, typed, overwrite)
    spec = recipe and recipe.spec
    yield from rows
    yield from data_rows(config, recipe, tokenizer)
    yield from _duration(recipe, tokenizer)
    yield from memory_rows(config.gpu_memory_limit_gb, spec)
    yield output_dir_row(config.output_dir)
    resumed = bool(checkpoint_paths(config.output_dir)) and not overwrite
    yield disk_row(config.output_dir, config.keep_latest_n_ckp, spec, resumed)


def print_table(config, typed, overwrite):
    """Print each row as soon as it is known, in stdout's encoding; raises RuntimeError if a run would fail."""
    num_failing = 0
    for row in examine(config, typed, overwrite):
        encoding = sys.stdout.encoding or "utf-8"
        print(as_text(row).encode(encoding, "backslashreplace").decode(encoding), flush=True)
        num_failing += row.fails
    if num_failing:
        raise RuntimeError(f"a run would fail: {num_failing} problem{'s' * (num_failing > 1)} above")


def as_text(row):
    """Text of a row, with its remedy on a second line."""
    text = texts_here()
    mark = text("mark.fails") if row.fails else text("mark.note") if row.remedy else text("mark.ok")
    what = padded(text.get(f"check.{row.what}", row.what), 18)
    return f"{padded(mark, 6)} {what} {row.found}" + (f"\n{'':<25} -> {row.remedy}" if row.remedy else "")


def _packages():
    text = texts_here()
    requirements = map(Requirement, tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"])
    satisfied = [f"Python {sys.version.split()[0]}"]
    for requirement in requirements:
        try:
            installed = version(requirement.name)
        except PackageNotFoundError:
            installed = ""
        if installed and requirement.specifier.contains(installed, prereleases=True):
            satisfied.append(f"{requirement.name} {installed}")
        else:
            remedy = f"pip install '{requirement}'"
            had = dict(name=requirement.name, installed=installed or text("doctor.missing"))
            yield Row("package", text("doctor.not_wanted", wanted=requirement.specifier, **had), remedy, fails=True)
    yield Row("packages", ", ".join(satisfied))


def _gpus(backend):
    text = texts_here()
    try:
        on_cpu = must_use_cpu()
    except RuntimeError as error:
        yield Row("GPUs", text("doctor.no_gpus"), str(error), fails=True)
        return
    if on_cpu and backend == "nccl":
        yield Row("GPUs", text("doctor.nccl_without"), text("doctor.leave_backend"), fails=True)
        return
    if on_cpu:
        yield Row("GPUs", text("doctor.on_cpu", version=torch.__version__))
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        card = dict(name=properties.name, major=properties.major, minor=properties.minor)
        yield Row(f"GPU {index}", text("doctor.gpu", free=free / GIB, total=total / GIB, **card))
    nccl = (
        ".".join(map(str, torch.cuda.nccl.version()))
        if torch.distributed.is_nccl_available()
        else text("doctor.missing")
    )
    yield Row("CUDA", text("doctor.cuda", version=torch.version.cuda, nccl=nccl, driver=_driver()))
    if not (shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")):
        yield Row("C compiler", text("doctor.none"), text("doctor.compiler"), fails=True)


def _driver():
    path = Path("/proc/driver/nvidia/version")
    found = re.search(r"\d+\.\d+(\.\d+)?", path.read_text()) if path.exists() else None
    return found.group() if found else texts_here()("doctor.unknown")


def _links():
    """Links between the GPUs as `nvidia-smi topo -m` names them: NV# is NVLink, PIX to SYS are increasingly distant."""
    count = torch.cuda.device_count()
    if count < 2:
        return
    is_direct = all(torch.cuda.can_device_access_peer(a, b) for a in range(count) for b in range(count) if a != b)
    text = texts_here()
    which = text("doctor.links.all") if is_direct else text("doctor.links.some")
    yield Row("GPU links", text("doctor.links", links=_topology(), which=which))


def _topology():
    try:
        text = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        return texts_here()("doctor.links.silent")
    rows = [line.split() for line in re.sub(r"\x1b\[[\d;]*m", "", text).splitlines()]
    gpus = [cells for cells in rows if cells and re.fullmatch(r"GPU\d+", cells[0]) and "X" in cells]
    return ", ".join(f"{a[0]}-{b[0]} {a[1 + j]}" for i, a in enumerate(gpus) for j, b in enumerate(gpus) if i < j)


def _cores():
    num_cores, load, text = num_cpus(), os.getloadavg()[0], texts_here()
    remedy = text("doctor.busy") if load > num_cores else ""
    return Row("CPU", text("doctor.cores", cores=num_cores, load=load, threads=torch.get_num_threads()), remedy)


def _locale():
    encodings = {locale.getpreferredencoding(False), sys.getfilesystemencoding(), sys.stdout.encoding or "utf-8"}
    bad = sorted(name for name in encodings if name.lower().replace("-", "") != "utf8")
    remedy = texts_here()("doctor.lang") if bad else ""
    return Row("locale", ", ".join(bad) or "UTF-8", remedy)


def _round_trips():
    """Try an all-reduce in child processes: over Gloo, which every multi-rank run uses, and NCCL for several GPUs."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    problem, text = try_backend("gloo", 2), texts_here()
    remedy = text("doctor.gloo_remedy") if problem else ""
    yield Row("Gloo", problem or text("doctor.gloo"), remedy, fails=bool(problem) and count > 1)
    if count > 1:
        verdict = find_backend(count)
        backend, failures = in_words(verdict.backend, verdict.env), "; ".join(verdict.failures)
        found = text("doctor.nccl", count=count, backend=backend, seconds=verdict.seconds)
        remedy = text("doctor.nccl_remedy", failures=failures) if failures else ""
        yield Row("NCCL", found, remedy)


def _duration(recipe, tokenizer):
    """Row of the expected time on this machine's GPUs, where their data sheet is known and the run can be planned."""
    name, sheet = card("")
    if not recipe or not sheet:
        return
    with suppress(ValueError, NothingFits):  # other rows say what is wrong
        predicted = predict(recipe, sample_of(recipe, tokenizer), memory_here(), name, sheet)
        yield Row("expected time", expected_text(**predicted["expected"]))


def model_rows(config, typed, overwrite):
    """(Recipe or None, tokenizer or None, Rows) of what a run would start from: checkpoint, tokenizer, weights."""
    skipped, recipe, tokenizer, text = [], None, None, texts_here()
    paths = [] if overwrite else checkpoint_paths(config.output_dir)
    try:
        found = load_newest(config.output_dir, skipped.append) if paths else None
    except LaterFormat as error:
        return None, None, [Row("checkpoint", text("doctor.unreadable"), str(error), fails=True)]
    rows = [Row("checkpoint", problem, text("doctor.one_before")) for problem in skipped]
    if paths and not found:
        rows.append(Row("checkpoint", text("doctor.all_damaged"), text("doctor.overwrite"), fails=True))
        return None, None, rows
    try:
        origin = find_origin(ALONE, config, typed, found)
        tokenizer = origin.tokenizer
        recipe, store, mixture = _recipe(config, typed, origin)
        if found:
            check_same_run(found, train_option(config), _new_state(recipe, tokenizer, store, mixture, found.state))
        draft_model(recipe)
    except (ValueError, OSError) as error:
        rows.append(Row("tokenizer, model", text("doctor.cannot_start"), str(error), fails=True))
        return recipe, tokenizer, rows
    return recipe, tokenizer, rows + _started_from(recipe, tokenizer, found)


def _recipe(config, typed, origin):
    """(Recipe, TokenStore, Mixture) of the run; the last two are None if no run has tokenised its files yet.

    Raises ValueError for a damaged token store, also of the pairs to evaluate on.
    """
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    machine = machine_here(max(torch.cuda.device_count(), 1), device_type)
    recipe, files = resolve(config, typed, machine, origin), train_files(config)
    store = _store(recipe, origin.tokenizer, files)
    if config.validation_file:
        _store(recipe, origin.tokenizer, files_of(config, "validation_file"))
    if store is None:
        return recipe, None, None
    mixture = mixture_of(store.rows_of_files, [file.weight for file in files])
    epoch_pairs = mixture.epoch_pairs if mixture else len(store)
    return resolve(config, typed, machine, origin, epoch_pairs), store, mixture


def _store(recipe, tokenizer, files):
    """TokenStore of these DataFiles; None if no run has tokenised them yet."""
    exist = all(Path(file.path).is_file() for file in files)
    return find_store(source_of(recipe, tokenizer, files), TOKENS_DIR) if exist else None


def _new_state(recipe, tokenizer, store, mixture, old):
    """TrainState before the first step; without a TokenStore, with the pairs of the TrainState `old`."""
    if store:
        return new_state(recipe, tokenizer, store, mixture)
    return replace(new_state(recipe, tokenizer, (), None), num_pairs=old.num_pairs, mixture=old.mixture)


def _started_from(recipe, tokenizer, found):
    """Rows of what a run can start from, with the Checkpoint `found` or None, and of its optimizer with its reason."""
    text, config, spec = texts_here(), recipe.config, recipe.spec
    known = dict(directory=tokenizer.directory, tokens=tokenizer.vocab_size, fingerprint=tokenizer.fingerprint)
    weights = count_of(spec.parameters, text)
    optimizer = dict(name=config.optimizer, why=text(f"why.{recipe.why_optimizer}"), learn_rate=config.learn_rate)
    rows = [
        Row("tokenizer", text("doctor.tokenizer", **known)),
        Row("model", text("doctor.model", weights=weights, origin=_origin(config, found))),
        Row("optimizer", text("plan.optimizer.found", **optimizer)),
    ]
    if spec.lora:
        rows.append(Row("adapter", text("doctor.adapter", rank=spec.lora.rank, weights=count_of(spec.trained, text))))
    return rows


def _origin(config, found):
    if found:
        return texts_here()("doctor.model.resumed", checkpoint=found.path)
    return config.finetune_from_ckp_file or texts_here()("doctor.model.random")
