"""Imports go one way, between packages and inside each of them.

The sources are parsed with ast, so this needs neither torch nor a GPU and takes milliseconds.
"""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# A package imports only from packages above it. A module imports only from lines above its own in its package, so
# modules of one line do not import each other.
ROOMS = {
    "config": [""],
    "model.runtime": [
        "atomic_io device_memory fault_injection json_stream peers terminal",
        "nccl_check watchdog",
        "distributed",
    ],
    "model.data": [
        "buckets cleaning columns length_histogram packing pair_hashes parquet_rows sampler text_files tokenizer_file",
        "readers tokenizer",
        "token_store",
    ],
    "model.nn": [
        "flat_params philox",
        "kernels.dropout",
        "kernels",
        "attention dropout loss",
        "t5.batch t5.position_bias t5.footprint",
        "t5.network",
        "t5.huggingface",
        "weights_io",
    ],
    "model.generate": ["answers"],
    "model.memory": [
        "estimate",
        "plan",
        "oom_policy",
    ],
    "model.train": [
        "cuda_graphs fixed_shards lr_schedule optim spike_guard",
        "evaluate footprint loader",
        "gradients",
        "dry_run step",
    ],
    "model.run": [
        "console journal train_state",
        "checkpoint log plots",
        "checkpointer run_dir",
        "run_log",
    ],
    "model.commands": [
        "option_names",
        "options",
        "origin",
        "setup",
        "doctor plan_report",
    ],
    "bench": [
        "children clock corpus mutations",
        "fuzz_checkpoint loops",
        "fuzz_strangers report",
        "fuzz_targets",
        "",
    ],
    "scripts": [""],
    "train_low_mem": [""],
}
APPLICATIONS = ("bench", "scripts", "train_low_mem")
# {library: the only modules that may import it}
ALLOWED_IMPORTERS = {
    "accelerate": "model.runtime.distributed",
    "transformers": "model.nn.t5.huggingface model.data.tokenizer scripts bench",
    "tokenizers": "model.data.tokenizer model.data.tokenizer_file",
    "datasets": "model.data.token_store",
    "fire": "train_low_mem scripts bench",
    "pickle": "",
}


def within(module, name):
    return module == name or module.startswith(name + ".")


def place_of(module):
    """(index of the package, index of the line in it) of a module; None for other libraries.

    The line is -1 for the package itself and None for a module that the package does not list.
    """
    for number, (room, lines) in enumerate(ROOMS.items()):
        if not within(module, room):
            continue
        inner = module[len(room) + 1 :]
        for floor, line in enumerate(lines):
            if inner == line or any(within(inner, name) for name in line.split()) or (inner and line == ""):
                return number, floor
        return (number, None) if inner else (number, -1)
    return None


def name_of(path, root):
    return ".".join(path.relative_to(root).with_suffix("").parts)


def sources(root):
    """Every Python file of the project under `root` but tests and __init__.py."""
    tops = [root / "config.py", root / "train_low_mem.py"]
    inside = [path for folder in ("model", "scripts", "bench") for path in sorted((root / folder).rglob("*.py"))]
    return [path for path in tops + inside if path.exists() and path.name != "__init__.py"]


def imports_of(path):
    """Yield the names that `path` imports, at the top or inside functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno}: write the import in full, not relative"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def faults_of(path, root):
    """Yield the problems with a module's place in ROOMS and with its imports."""
    mine = name_of(path, root)
    place = place_of(mine)
    if place is None or place[1] is None:
        yield f"{mine} is in no package of ROOMS: add it there"
        return
    for other in imports_of(path):
        theirs = place_of(other)
        known = theirs is not None and theirs[1] not in (None, -1)
        both_applications = mine.split(".")[0] in APPLICATIONS and other.split(".")[0] in APPLICATIONS
        if known and not theirs < place and not (both_applications and theirs[0] != place[0]):
            yield f"{mine} imports {other}, which is not above it in ROOMS"
        allowed = ALLOWED_IMPORTERS.get(other.split(".")[0])
        if allowed is not None and not any(within(mine, importer) for importer in allowed.split()):
            yield f"{mine} imports {other}: only {allowed or 'no module'} may"


@pytest.mark.parametrize("path", sources(ROOT), ids=lambda path: name_of(path, ROOT))
def test_a_module_imports_only_from_lower_floors(path):
    assert not list(faults_of(path, ROOT))


@pytest.mark.parametrize(
    "module, text, fault",
    [
        ("model/data/readers.py", "from model.train.step import train_steps", "not above it in ROOMS"),
        ("model/runtime/atomic_io.py", "import model.runtime.distributed", "not above it in ROOMS"),
        ("model/nn/loss.py", "def f():\n    from model.nn.t5.network import TextToTextModel", "not above it in ROOMS"),
        ("model/nn/attention.py", "from model.nn import loss", "not above it in ROOMS"),
        ("model/run/journal.py", "import train_low_mem", "not above it in ROOMS"),
        ("model/misc.py", "", "in no package of ROOMS"),
        ("model/data/misc.py", "", "in no package of ROOMS"),
        ("model/misc/parts.py", "", "in no package of ROOMS"),
        ("model/run/journal.py", "import transformers", "only model.nn.t5.huggingface"),
        ("model/run/checkpoint.py", "import pickle", "no module"),
    ],
)
def test_a_planted_violation_is_found(tmp_path, module, text, fault):
    path = tmp_path / module
    path.parent.mkdir(parents=True)
    path.write_text(text + "\n")
    found = [words for source in sources(tmp_path) for words in faults_of(source, tmp_path)]
    assert found and all(fault in words for words in found)


def test_each_init_file_holds_only_a_docstring():
    for folder in {path.parent for path in sources(ROOT) if ROOT / "model" in path.parents}:
        (only,) = ast.parse((folder / "__init__.py").read_text(encoding="utf-8")).body
        assert isinstance(only, ast.Expr) and len(only.value.value) > 40, folder


def test_config_needs_only_the_standard_library():
    for other in imports_of(ROOT / "config.py"):
        assert other.split(".")[0] in sys.stdlib_module_names, f"config.py imports {other}"
