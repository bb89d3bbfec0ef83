"""The house's one structural rule: a module imports only from floors below its own.

Read with ast, so it needs neither torch nor a GPU and takes milliseconds.
"""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

FLOORS = [
    {"model.option_names"},
    {
        "config",
        "model.faults",
        "model.fused",
        "model.weights",
        "model.durable",
        "model.json_items",
        "model.spikes",
        "model.columns",
        "model.device_memory",
        "model.lengths",
        "model.pair_hashes",
        "model.peers",
    },
    {
        "model.kernels",
        "model.preflight",
        "model.tokenizer_file",
        "model.parquet_rows",
        "model.text_files",
        "model.watch",
    },
    {"model.ranks", "model.tokenizer", "model.pairs", "model.attention", "model.loss", "model.report"},
    {
        "model.dataset",
        "model.chat_model",
        "model.export",
        "model.optim",
        "model.plots",
        "model.exact",
        "model.log",
        "model.request",
    },
    {"model.batches", "model.estimate", "model.graphs"},
    {"model.plan"},
    {"model.memory"},
    {"model.feed", "model.evaluate", "model.train_state"},
    {"model.checkpoint"},
    {"model.attempt", "model.run_dir", "model.saver", "model.origin"},
    {"model.step"},
    {"model.rehearsal"},
    {"model.prepare", "model.record"},
    {"model.preview", "model.doctor", "bench.mutations", "bench.children", "bench.clock", "bench.corpus"},
    {"bench.loops", "bench.fuzz_checkpoint"},
    {"bench.report", "bench.fuzz_strangers"},
    {"bench.fuzz_targets"},
    {"train_low_mem", "scripts", "bench"},
]
# A package named here comes in by these doors only.
DOORS = {
    "accelerate": {"model.ranks", "model.record"},  # record only asks for its version
    "transformers": {"model.export", "model.tokenizer", "model.record", "scripts", "bench"},
    "tokenizers": {"model.tokenizer", "model.tokenizer_file"},
    "datasets": {"model.dataset"},
    "ujson": {
        "model.dataset",
        "model.report",
        "model.ranks",
        "model.checkpoint",
        "model.run_dir",
        "model.preview",
        "model.plots",
        "scripts",
    },
    "fire": {"train_low_mem", "scripts", "bench"},
    "pickle": set(),
}
FILES = [
    path
    for folder in (".", "model", "scripts", "bench")
    for path in sorted((ROOT / folder).glob("*.py"))
    if path.name != "__init__.py"
]


def name_of(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def within(module, names):
    return any(module == name or module.startswith(name + ".") for name in names)


def floor_of(module):
    """Floor number of `module`, or None if it is not one of ours."""
    return next((floor for floor, names in enumerate(FLOORS) if within(module, names)), None)


def imports_of(path):
    """Names that `path` imports, wherever in the file the import stands."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno}: write the import in full, not relative"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_only_from_lower_floors(path):
    mine = name_of(path)
    assert floor_of(mine) is not None, f"{mine} stands on no floor: add it to FLOORS"
    for other in imports_of(path):
        theirs = floor_of(other)
        assert theirs is None or theirs < floor_of(mine), (
            f"{mine} (floor {floor_of(mine)}) imports {other} (floor {theirs})"
        )
        doors = DOORS.get(other.split(".")[0])
        assert doors is None or within(mine, doors), f"{mine} imports {other}: only {sorted(doors)} may"


def test_config_needs_only_the_standard_library():
    option_names = ROOT / "model" / "option_names.py"
    for other in (*imports_of(ROOT / "config.py"), *imports_of(option_names)):
        assert within(other, {"model.option_names"}) or other.split(".")[0] in sys.stdlib_module_names, (
            f"config.py imports {other}"
        )
