"""The house's one structural rule: a module imports only from floors below its own.

Read with ast, so it needs neither torch nor a GPU and takes milliseconds.
"""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

FLOORS = [
    {"model.commands.option_names"},
    {
        "config",
        "model.runtime.fault_injection",
        "model.nn.kernels.norm",
        "model.nn.flat_params",
        "model.runtime.atomic_io",
        "model.runtime.json_stream",
        "model.train.spike_guard",
        "model.data.columns",
        "model.runtime.device_memory",
        "model.data.length_histogram",
        "model.data.pair_hashes",
        "model.runtime.peers",
    },
    {
        "model.nn.kernels.attention",
        "model.runtime.nccl_check",
        "model.data.tokenizer_file",
        "model.data.parquet_rows",
        "model.data.text_files",
        "model.runtime.watchdog",
    },
    {
        "model.runtime.distributed",
        "model.data.tokenizer",
        "model.data.readers",
        "model.nn.attention",
        "model.nn.loss",
        "model.run.console",
    },
    {
        "model.data.token_store",
        "model.nn.t5.network",
        "model.nn.t5.huggingface",
        "model.train.optim",
        "model.run.plots",
        "model.train.fixed_shards",
        "model.run.log",
        "model.commands.options",
    },
    {"model.data.sampler", "model.memory.estimate", "model.train.cuda_graphs"},
    {"model.memory.plan"},
    {"model.memory.oom_policy"},
    {"model.train.loader", "model.train.evaluate", "model.run.train_state"},
    {"model.run.checkpoint"},
    {"model.train.gradients", "model.run.run_dir", "model.run.checkpointer", "model.commands.origin"},
    {"model.train.step"},
    {"model.train.dry_run"},
    {"model.commands.setup", "model.run.run_log"},
    {
        "model.commands.plan_report",
        "model.commands.doctor",
        "bench.mutations",
        "bench.children",
        "bench.clock",
        "bench.corpus",
    },
    {"bench.loops", "bench.fuzz_checkpoint"},
    {"bench.report", "bench.fuzz_strangers"},
    {"bench.fuzz_targets"},
    {"train_low_mem", "scripts", "bench"},
]
# A package named here comes in by these doors only.
DOORS = {
    "accelerate": {"model.runtime.distributed", "model.run.run_log"},  # record only asks for its version
    "transformers": {"model.nn.t5.huggingface", "model.data.tokenizer", "model.run.run_log", "scripts", "bench"},
    "tokenizers": {"model.data.tokenizer", "model.data.tokenizer_file"},
    "datasets": {"model.data.token_store"},
    "ujson": {
        "model.data.token_store",
        "model.run.console",
        "model.runtime.distributed",
        "model.run.checkpoint",
        "model.run.run_dir",
        "model.commands.plan_report",
        "model.run.plots",
        "scripts",
    },
    "fire": {"train_low_mem", "scripts", "bench"},
    "pickle": set(),
}
FILES = [
    path
    for folder in (".", "model", "scripts", "bench")
    for path in sorted((ROOT / folder).glob("**/*.py" if folder == "model" else "*.py"))
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
    for other in imports_of(ROOT / "config.py"):
        assert other.split(".")[0] in sys.stdlib_module_names, f"config.py imports {other}"
