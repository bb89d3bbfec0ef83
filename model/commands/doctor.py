"""The command `doctor`: checks machine, data and options for a run; a table with a remedy for each problem."""

import locale
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path

import torch
from packaging.requirements import Requirement

from model.commands.network import make_model
from model.commands.options import FILE_OPTIONS
from model.commands.origin import find_origin
from model.commands.same_run import check_same_run
from model.commands.settled import settled
from model.commands.space import Row, disk_row, memory_rows, output_dir_row
from model.data.file_list import data_files
from model.data.sampler import mixture_of
from model.data.store_writer import side_lengths
from model.data.token_store import Source, find_store
from model.run.checkpoint import checkpoint_paths, load_newest
from model.run.messages import texts_here
from model.run.run_dir import TOKENS_DIR
from model.run.train_state import LaterFormat, TrainState
from model.runtime.distributed import ALONE
from model.runtime.launch import must_use_cpu
from model.runtime.nccl_check import find_backend, in_words, try_backend
from model.train.footprint import memory_spec
from model.train.objectives.registry import objective_for, objective_of

GIB = 2**30
ROOT = Path(__file__).resolve().parents[2]
FIRST_ROWS = 2000  # of each data file are read
MIN_SHM_BYTES = GIB  # NCCL takes some MiB per pair of GPUs; Docker gives 64 MiB in total by default


def examine(config, typed=(), overwrite=False):
    """Yield a Row for each check of this machine, the data and `config`; `typed` as in prepare_run.

    With `overwrite` the checkpoints in output_dir are ignored, as a run would move them aside.
    """
    yield from _packages()
    yield from _gpus(config.backend)
    yield from _links()
    yield _cores()
    yield _shared_memory()
    yield _locale()
    yield from _round_trips()
    spec, origin, rows = _model(config, typed, overwrite)
    yield from rows
    yield from _data(config, origin)
    yield from memory_rows(config, spec)
    yield output_dir_row(config)
    yield disk_row(config, spec)


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
    mark = "FAILS" if row.fails else "note" if row.remedy else "ok"
    return f"{mark:<6} {row.what:<18} {row.found}" + (f"\n{'':<25} -> {row.remedy}" if row.remedy else "")


def _packages():
    requirements = map(Requirement, tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"])
    satisfied = [f"Python {sys.version.split()[0]}"]
    for requirement in requirements:
        try:
            installed = version(requirement.name)
        except PackageNotFoundError:
            installed = "missing"
        if installed != "missing" and requirement.specifier.contains(installed, prereleases=True):
            satisfied.append(f"{requirement.name} {installed}")
        else:
            remedy = f"pip install '{requirement}'"
            yield Row("package", f"{requirement.name} {installed}, not {requirement.specifier}", remedy, fails=True)
    yield Row("packages", ", ".join(satisfied))


def _gpus(backend):
    try:
        on_cpu = must_use_cpu()
    except RuntimeError as error:
        yield Row("GPUs", "torch sees none", str(error), fails=True)
        return
    if on_cpu and backend == "nccl":
        yield Row("GPUs", "none, but --backend=nccl needs GPUs", "leave --backend out", fails=True)
        return
    if on_cpu:
        yield Row("GPUs", f"none for torch {torch.__version__}: a run uses the CPU")
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        found = f"{properties.name}, compute {properties.major}.{properties.minor}, "
        yield Row(f"GPU {index}", f"{found}{free / GIB:.1f} of {total / GIB:.1f} GiB free")
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "missing"
    yield Row("CUDA", f"{torch.version.cuda} in torch, NCCL {nccl}, driver {_driver()}")
    if not (shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")):
        remedy = "apt-get install gcc (Triton compiles its kernels' launchers with it)"
        yield Row("C compiler", "none", remedy, fails=True)


def _driver():
    path = Path("/proc/driver/nvidia/version")
    found = re.search(r"\d+\.\d+(\.\d+)?", path.read_text()) if path.exists() else None
    return found.group() if found else "unknown"


def _links():
    """Links between the GPUs as `nvidia-smi topo -m` names them: NV# is NVLink, PIX to SYS are increasingly distant."""
    count = torch.cuda.device_count()
    if count < 2:
        return
    is_direct = all(torch.cuda.can_device_access_peer(a, b) for a in range(count) for b in range(count) if a != b)
    yield Row("GPU links", f"{_topology()}; direct access {'between all' if is_direct else 'not between all: slower'}")


def _topology():
    try:
        text = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        return "nvidia-smi does not answer"
    rows = [line.split() for line in re.sub(r"\x1b\[[\d;]*m", "", text).splitlines()]
    gpus = [cells for cells in rows if cells and re.fullmatch(r"GPU\d+", cells[0]) and "X" in cells]
    return ", ".join(f"{a[0]}-{b[0]} {a[1 + j]}" for i, a in enumerate(gpus) for j, b in enumerate(gpus) if i < j)


def _cores():
    num_cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    remedy = "other programs use them: a run will be slower" if load > num_cores else ""
    return Row("CPU", f"{num_cores} cores, load {load:.1f}, {torch.get_num_threads()} threads per process", remedy)


def _shared_memory():
    if not os.path.isdir("/dev/shm"):
        return Row("/dev/shm", "missing", "mount it, or export NCCL_SHM_DISABLE=1, if NCCL complains")
    free = shutil.disk_usage("/dev/shm").free
    remedy = "give the container more (docker run --shm-size=8g) if NCCL complains" if free < MIN_SHM_BYTES else ""
    return Row("/dev/shm", f"{free / GIB:.1f} GiB free", remedy)


def _locale():
    encodings = {locale.getpreferredencoding(False), sys.getfilesystemencoding(), sys.stdout.encoding or "utf-8"}
    bad = sorted(name for name in encodings if name.lower().replace("-", "") != "utf8")
    remedy = "export LANG=C.UTF-8, or PYTHONUTF8=1: Chinese output and file names need it" if bad else ""
    return Row("locale", ", ".join(bad) or "UTF-8", remedy)


def _round_trips():
    """Try an all-reduce in child processes: over Gloo, which every multi-rank run uses, and NCCL for several GPUs."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    problem = try_backend("gloo", 2)
    remedy = "export GLOO_SOCKET_IFNAME=lo, and add this machine's name to /etc/hosts" if problem else ""
    yield Row("Gloo", problem or "2 processes: ok", remedy, fails=bool(problem) and count > 1)
    if count > 1:
        verdict = find_backend(count)
        found = f"{count} GPUs: {in_words(verdict.backend, verdict.env)} works, found in {verdict.seconds:.1f} s"
        remedy = "nothing to do, train finds this by itself: " + "; ".join(verdict.failures) if verdict.failures else ""
        yield Row("NCCL", found, remedy)


def _data(config, origin):
    """Rows of the data files that the options name; without an Origin they are read and not encoded."""
    for what, parse in FILE_OPTIONS.items():
        names = getattr(config, what)
        if not names:
            continue
        try:
            files = parse(names)
        except ValueError as error:
            yield Row(what, names, str(error), fails=True)
            continue
        for file in files:
            row = _first_rows(what, file.path, config, origin)
            yield row if file.weight == 1 else replace(row, found=f"{row.found}; {file.weight:g} times an epoch")


def _first_rows(what, file, config, origin):
    try:
        objective = objective_for(config, origin.model_config, origin.tokenizer) if origin else objective_of(config)
        columns = config.prompt_column, config.response_column
        rows = list(islice(objective.read(file, columns, Counter()), FIRST_ROWS))
    except ValueError as error:
        return Row(what, file, str(error), fails=True)
    found = f"{file}, {Path(file).stat().st_size / 2**20:.1f} MiB; {len(rows)} rows checked"
    if not origin:
        return Row(what, found)
    encoded = objective.encode(rows, origin.tokenizer, config.max_seq_len)
    if not encoded.sides[0]:
        remedy = f"none of its first {len(rows)} rows has {objective.needs}"
        return Row(what, file, remedy, fails=len(rows) < FIRST_ROWS)  # else later rows may be usable
    tokens = " + ".join(map(str, objective.length_bounds(side_lengths(encoded))[0]))
    return Row(what, f"{found}; the first example has {tokens} tokens")


def _model(config, typed, overwrite):
    """(MemorySpec or None, Origin or None, Rows) of what a run would start from: checkpoint, tokenizer, weights."""
    skipped, origin = [], None
    paths = [] if overwrite else checkpoint_paths(config.output_dir)
    try:
        found = load_newest(config.output_dir, skipped.append) if paths else None
    except LaterFormat as error:
        return None, None, [Row("checkpoint", "cannot be read", str(error), fails=True)]
    rows = [Row("checkpoint", text, "nothing to do: the one before it is used") for text in skipped]
    if paths and not found:
        rows.append(Row("checkpoint", "all are damaged", "start a new run with --overwrite=True", fails=True))
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
        return None, origin, [*rows, Row("tokenizer, model", "cannot start", str(error), fails=True)]
    spec = memory_spec(config, model.config, model.compute_dtype, "cpu")
    rows.append(Row("tokenizer", f"{tokenizer.directory}, {tokenizer.vocab_size} tokens, {tokenizer.fingerprint}"))
    rows.append(Row("model", f"{spec.parameters / 1e6:.1f} M weights from {_origin(config, found)}"))
    text = f"{config.optimizer}, {texts_here()(f'why.{why}')}; peak learning rate {config.learn_rate:g}"
    rows.append(Row("optimizer", text))
    rows += [Row("adapter", f"rank {spec.lora.rank}, {spec.trained / 1e6:.2f} M weights")] if spec.lora else []
    return spec, origin, rows


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
        return f"{found.path}: resume with --is_keep_training=True"
    return config.finetune_from_ckp_file or "random initialisation"
