"""The command `doctor`: checks machine, data and options for a run; a table with a remedy for each problem."""

import locale
import os
import re
import shutil
import subprocess
import sys
import tomllib
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from packaging.requirements import Requirement

from model.commands.data_rows import data_rows
from model.commands.expected_time import expected_text
from model.commands.network import make_model
from model.commands.objective import objective_for
from model.commands.options import FILE_OPTIONS
from model.commands.origin import find_origin
from model.commands.plan_report import preview
from model.commands.recipe import memory_spec
from model.commands.same_run import check_same_run
from model.commands.settled import settled
from model.commands.space import Row, disk_row, memory_rows, output_dir_row, shared_memory_row
from model.data.file_list import data_files
from model.data.sampler import mixture_of
from model.data.token_store import Source, find_store
from model.display.catalogue import texts_here
from model.display.console import padded
from model.display.view import count_of
from model.memory.duration import gpu_named
from model.memory.plan import NothingFits
from model.run.checkpoint import checkpoint_paths, load_newest
from model.run.run_dir import TOKENS_DIR
from model.run.train_state import LaterFormat, TrainState
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
    spec, origin, rows = _model(config, typed, overwrite)
    yield from rows
    yield from data_rows(config, origin)
    yield from _duration(config, typed, origin)
    yield from memory_rows(config, spec)
    yield output_dir_row(config)
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


def _duration(config, typed, origin):
    """Row of the expected time on this machine's GPUs, where their data sheet is known and the run can be planned."""
    if not origin or not torch.cuda.is_available() or not gpu_named(torch.cuda.get_device_name(0)):
        return
    with suppress(ValueError, NothingFits):  # other rows say what is wrong
        yield Row("expected time", expected_text(**preview(config, typed)["expected"]))


def _model(config, typed, overwrite):
    """(MemorySpec or None, Origin or None, Rows) of what a run would start from: checkpoint, tokenizer, weights."""
    skipped, origin, text = [], None, texts_here()
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
        store, *_ = [_store(config, parse(names), origin) for names, parse in _data_options(config)]
        if found:
            check_same_run(found, config, _new_state(config, tokenizer, store, found.state))
        config, why = settled(config, typed, origin)
        model = make_model(ALONE, config, origin.model_config, origin.weights, origin.adapter)
    except (ValueError, OSError) as error:
        return None, origin, [*rows, Row("tokenizer, model", text("doctor.cannot_start"), str(error), fails=True)]
    spec = memory_spec(config, model.config, model.compute_dtype, "cpu")
    return spec, origin, rows + _model_rows(config, tokenizer, spec, found, why)


def _model_rows(config, tokenizer, spec, found, why):
    """Rows of what a run can start from, with the Checkpoint `found` or None, and of its optimizer with its reason."""
    text = texts_here()
    known = dict(directory=tokenizer.directory, tokens=tokenizer.vocab_size, fingerprint=tokenizer.fingerprint)
    weights = count_of(spec.parameters, text)
    optimizer = dict(name=config.optimizer, why=text(f"why.{why}"), learn_rate=config.learn_rate)
    rows = [
        Row("tokenizer", text("doctor.tokenizer", **known)),
        Row("model", text("doctor.model", weights=weights, origin=_origin(config, found))),
        Row("optimizer", text("plan.optimizer.found", **optimizer)),
    ]
    if spec.lora:
        rows.append(Row("adapter", text("doctor.adapter", rank=spec.lora.rank, weights=count_of(spec.trained, text))))
    return rows


def _data_options(config):
    """(names, parser) of the files that a run reads: those to train on, and those to evaluate on if there are any."""
    options = ((getattr(config, name), FILE_OPTIONS[name]) for name in ("train_file", "validation_file"))
    return [(names, parse) for names, parse in options if names]


def _new_state(config, tokenizer, store, old):
    """TrainState of a new run with these options; without a TokenStore, with the pairs of the TrainState `old`."""
    pairs = dict(num_pairs=old.num_pairs, mixture=old.mixture)
    if store:
        mixture = mixture_of(store.rows_of_files, [file.weight for file in data_files(config.train_file)])
        pairs = dict(num_pairs=len(store), ids_sha256=store.meta["ids_sha256"])
        pairs["mixture"] = mixture.identity if mixture else ""
    return TrainState(
        seed=config.seed,
        tokenizer_fingerprint=tokenizer.fingerprint,
        max_seq_len=config.max_seq_len,
        objective=config.objective,
        **pairs,
    )


def _store(config, files, origin):
    """TokenStore of these DataFiles; None if no run has tokenised them yet."""
    paths, columns = tuple(file.path for file in files), (config.prompt_column, config.response_column)
    objective = objective_for(config, origin.model_config, origin.tokenizer)
    source = Source(paths, objective, origin.tokenizer, config.max_seq_len, columns)
    return find_store(source, TOKENS_DIR) if all(Path(path).is_file() for path in paths) else None


def _origin(config, found):
    if found:
        return texts_here()("doctor.model.resumed", checkpoint=found.path)
    return config.finetune_from_ckp_file or texts_here()("doctor.model.random")
