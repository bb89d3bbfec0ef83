"""Imports go one way, functions take few parameters, options stay above, families and objectives in their places.

The sources are parsed with ast, so this needs neither torch nor a GPU and takes milliseconds.
"""

import ast
import sys
from pathlib import Path

import pytest

from tests.sources import bound_in, imports_of, name_of, names_of, sources, within

ROOT = Path(__file__).resolve().parents[1]

# A package imports only from packages above it. A module imports only from lines above its own in its package, so
# modules of one line do not import each other.
ROOMS = {
    "config": [""],
    "model.runtime": [
        "activity atomic_io cgroup cuda_start device_memory environment fault_injection json_stream laps launch "
        "launcher module_process peers recorder terminal",
        "nccl_check watchdog",
        "distributed",
    ],
    "model.data": [
        "columns control_tokens file_list length_histogram near_duplicates packing parquet_rows row_hashes sampler "
        "sequences template_process text_files tokenizer_file",
        "buckets tokenizer",
        "conversation tokenizer_training",
        "chat_template cleaning dialogue turn_template",
        "prepared_pairs readers",
        "store_writer",
        "token_store",
    ],
    "model.nn": [
        "decoder.sizes flat_batch gradient_parts kernels.adamw kernels.cross_entropy kernels.decode_attention "
        "kernels.gate kernels.lora kernels.muon kernels.nf4 kernels.rotary kernels.sums key_values packed_layout "
        "philox t5.sizes",
        "decoder.huggingface kernels.dropout quantized t5.huggingface",
        "flat_params kernels.norm",
        "activations decoder.rotary dropout kernels.attention loss",
        "adapted_product attention layers",
        "decoder.batch lora t5.batch t5.position_bias",
        "base decoder.decode t5.decode t5.warm_up",
        "decoder.network memory_spec t5.network",
        "decoder.footprint t5.footprint",
        "decoder.family t5.family",
        "registry",
    ],
    "model.formats": [
        "adapter_fields carried model_card tensor_files",
        "weights",
        "adapters conversions",
    ],
    "model.generate": [
        "sampling",
        "screen slots",
        "engine",
    ],
    "model.memory": [
        "estimate step_time",
        "duration plan",
        "oom_policy",
    ],
    "model.train": [
        "flat_optimizer lr_schedule objectives.base objectives.dialogues objectives.pairs orthogonal reduction "
        "spike_guard weighted_loss",
        "adamw adamw_rms commit cuda_graphs examples gradients",
        "adafactor evaluate loader muon",
        "derive optim",
        "step",
        "dry_run",
    ],
    "model.run": [
        "journal status train_state",
        "checkpoint",
        "run_dir saver",
    ],
    "model.display": [
        "captured_output check_words console curves durations figures log_file sensors tool_words trackers words",
        "catalogue plots",
        "drawing view",
        "screen summary",
        "watch",
        "live",
    ],
    "model.commands": [
        "data_report expected_time help_zh launcher_options model_cache objective recipe request_body run_events "
        "run_length space tokenising",
        "exporting foresight length_sample network no_model option_names usage",
        "evaluation options",
        "adapter data_rows guide_flags same_run",
        "origin settled",
        "plan_report setup",
        "doctor",
    ],
    "model.serve": [
        "answering connection decoding_thread openai_api server_metrics",
        "server",
    ],
    "bench": [
        "children clock runs",
        "corpus one_step small_cards",
        "loops lora",
        "memory_fit pictures several_machines",
        "",
    ],
    "scripts": [""],
    "train_low_mem": [""],
}
APPLICATIONS = ("bench", "scripts", "train_low_mem")
MAX_PARAMETERS = 8  # Triton kernels excepted
OPTIONS = {"TrainConfig", "load_config"}
WITHOUT_OPTIONS = (
    "model.runtime", "model.data", "model.nn", "model.formats", "model.generate", "model.memory", "model.train",
    "model.run", "model.display",
)  # fmt: skip
IMPORT_BY_NAME = {"__import__", "import_module"}
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
# {library: the only modules that may import it}
ALLOWED_IMPORTERS = {
    "accelerate": "model.runtime.distributed model.display.trackers",
    "matplotlib": "model.display.plots model.commands.data_report bench",
    "transformers": "model.nn.t5.huggingface model.nn.decoder model.data.template_process scripts bench",
    "tokenizers": "model.data.control_tokens model.data.tokenizer model.data.tokenizer_file "
    "model.data.tokenizer_training",
    "ctranslate2": "model.formats.conversions bench",
    "datasets": "bench",
    "rensa": "model.data.near_duplicates",
    "starlette": "model.serve.server",
    "prometheus_client": "model.serve.server_metrics",
    "uvicorn": "scripts.serve model.serve.connection",
    "fire": "train_low_mem scripts bench",
    "pickle": "",
}


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


def faults_of(path, root):
    """Yield the problems with a module's place in ROOMS and with its imports."""
    mine = name_of(path, root)
    place = place_of(mine)
    if place is None or place[1] is None:
        yield f"{mine} is in no package of ROOMS: add it there"
        return
    for other in imports_of(path):
        theirs = place_of(other)
        known = theirs is not None and theirs[1] is not None
        both_applications = mine.split(".")[0] in APPLICATIONS and other.split(".")[0] in APPLICATIONS
        if known and not theirs < place and not (both_applications and theirs[0] != place[0]):
            yield f"{mine} imports {other}, which is not above it in ROOMS"
        allowed = ALLOWED_IMPORTERS.get(other.split(".")[0])
        if allowed is not None and not any(within(mine, importer) for importer in allowed.split()):
            yield f"{mine} imports {other}: only {allowed or 'no module'} may"
    if found := IMPORT_BY_NAME & set(names_of(path)):
        yield f"{mine} uses {found.pop()}: write an import, which this test can read"


def long_signatures(path, root):
    """Yield a complaint about each function of more than MAX_PARAMETERS, self, cls and ctx not counted.

    What takes all other arguments (*rest, **rest) counts as one.
    """
    if within(name_of(path, root), "model.nn.kernels"):
        return
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, FUNCTIONS):
            args = node.args
            every = [*args.posonlyargs, *args.args, *args.kwonlyargs, *filter(None, (args.vararg, args.kwarg))]
            names = [arg.arg for arg in every if arg.arg not in ("self", "cls", "ctx")]
            if len(names) > MAX_PARAMETERS:
                name = f"{name_of(path, root)}.{getattr(node, 'name', 'lambda')}"
                yield f"{name} takes {len(names)} parameters, at most {MAX_PARAMETERS}"


def options_below(path, root):
    """Yield a complaint about a TrainConfig in a room that gets plain values."""
    if not any(within(name_of(path, root), room) for room in WITHOUT_OPTIONS):
        return
    parameters = [
        node.arg for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.arg)
    ]
    if "config" in parameters or OPTIONS & set(names_of(path)):
        yield f"{name_of(path, root)} takes a TrainConfig: give it plain values"


CHECKS = (faults_of, long_signatures, options_below)


@pytest.mark.parametrize("path", sources(ROOT), ids=lambda path: name_of(path, ROOT))
def test_a_module_keeps_to_its_floor_and_its_words(path):
    assert not [fault for check in CHECKS for fault in check(path, ROOT)]


@pytest.mark.parametrize(
    "module, text, fault",
    [
        ("model/data/readers.py", "from model.train.step import train_steps", "not above it in ROOMS"),
        ("model/runtime/atomic_io.py", "import model.runtime.distributed", "not above it in ROOMS"),
        ("model/nn/loss.py", "def f():\n    from model.nn.base import LanguageModel", "not above it in ROOMS"),
        ("model/nn/attention.py", "from model.nn import base", "not above it in ROOMS"),
        ("model/run/journal.py", "import train_low_mem", "not above it in ROOMS"),
        ("model/misc.py", "", "in no package of ROOMS"),
        ("model/data/misc.py", "", "in no package of ROOMS"),
        ("model/misc/parts.py", "", "in no package of ROOMS"),
        ("helpers.py", "", "in no package of ROOMS"),
        ("tools/parts.py", "", "in no package of ROOMS"),
        ("model/nn/loss.py", "from model import train", "not above it in ROOMS"),
        ("model/nn/loss.py", "import model.train", "not above it in ROOMS"),
        ("model/nn/loss.py", "import importlib\nimportlib.import_module('model.train.step')", "write an import"),
        ("model/run/journal.py", "import transformers", "only model.nn.t5.huggingface"),
        ("model/run/checkpoint.py", "import pickle", "no module"),
        ("model/train/step.py", "def f(a, b, c, d, e, f, g, h, i):\n    pass", "f takes 9 parameters"),
        ("bench/loss.py", "def f(a, b, c, *, d, e, f, g, h, i):\n    pass", "f takes 9 parameters"),
        ("model/train/step.py", "def f(a, b, c, d, e, f, g, h, *rest):\n    pass", "f takes 9 parameters"),
        ("model/train/step.py", "def f(a, b, c, *, d, e, f, g, h, **rest):\n    pass", "f takes 9 parameters"),
        ("model/serve/server.py", "async def f(a, b, c, d, e, f, g, h, i):\n    pass", "f takes 9 parameters"),
        ("model/train/step.py", "f = lambda a, b, c, d, e, f, g, h, i: a", "lambda takes 9 parameters"),
        ("model/memory/plan.py", "from config import TrainConfig", "takes a TrainConfig"),
        ("model/nn/loss.py", "def f(config):\n    pass", "takes a TrainConfig"),
        ("model/nn/loss.py", "import config\nx = config.TrainConfig()", "takes a TrainConfig"),
        ("model/nn/loss.py", "def f(run: 'TrainConfig'):\n    pass", "takes a TrainConfig"),
        ("model/memory/plan.py", "from config import load_config", "takes a TrainConfig"),
        ("model/display/live.py", "def live(ranks, config):\n    pass", "takes a TrainConfig"),
    ],
)
def test_a_planted_violation_is_found(tmp_path, module, text, fault):
    path = tmp_path / module
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")
    found = [words for source in sources(tmp_path) for check in CHECKS for words in check(source, tmp_path)]
    assert found and all(fault in words for words in found)


def test_each_init_file_holds_only_a_docstring():
    for folder in {path.parent for path in sources(ROOT) if ROOT / "model" in path.parents}:
        (only,) = ast.parse((folder / "__init__.py").read_text(encoding="utf-8")).body
        assert isinstance(only, ast.Expr) and len(only.value.value) > 40, folder


def test_tests_import_nothing_of_bench():
    for path in (ROOT / "tests").rglob("*.py"):
        mentioned = "bench" in path.read_text(encoding="utf-8")
        assert not (mentioned and [other for other in imports_of(path) if within(other, "bench")]), path


@pytest.mark.parametrize("path", sorted((ROOT / "bench").glob("*.py")), ids=lambda path: path.stem)
def test_what_a_benchmark_imports_is_there(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        module = ROOT.joinpath(*node.module.split(".")) if isinstance(node, ast.ImportFrom) else ROOT / "absent"
        if module.with_suffix(".py").exists():
            missing = {alias.name for alias in node.names} - set(bound_in(module.with_suffix(".py")))
            assert not missing, f"{path.name}:{node.lineno}: {node.module} has no {', '.join(missing)}"


def test_config_needs_only_the_standard_library():
    for other in imports_of(ROOT / "config.py"):
        assert other.split(".")[0] in sys.stdlib_module_names, f"config.py imports {other}"


def test_rooms_name_only_modules_that_exist():
    for room, lines in ROOMS.items():
        folder = ROOT.joinpath(*room.split("."))
        for name in " ".join(lines).split():
            path = folder.joinpath(*name.split("."))
            assert path.is_dir() or path.with_suffix(".py").exists(), f"{room}.{name}"
