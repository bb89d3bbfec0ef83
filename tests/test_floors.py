"""Imports go one way, functions take few parameters, options stay above, families and objectives in their places.

The sources are parsed with ast, so this needs neither torch nor a GPU and takes milliseconds.
"""

import ast
import re
import sys
from pathlib import Path

import pytest

from tests.sources import imports_of, name_of, names_of, sources, within, words_of

ROOT = Path(__file__).resolve().parents[1]

# A package imports only from packages above it. A module imports only from lines above its own in its package, so
# modules of one line do not import each other.
ROOMS = {
    "config": [""],
    "model.runtime": [
        "activity atomic_io cuda_start device_memory fault_injection json_stream laps launch module_process peers "
        "recorder terminal",
        "nccl_check watchdog",
        "distributed",
    ],
    "model.data": [
        "columns file_list length_histogram near_duplicates packing parquet_rows row_hashes sampler sequences "
        "template_process text_files tokenizer_file",
        "buckets tokenizer",
        "conversation tokenizer_training",
        "chat_template cleaning dialogue turn_template",
        "prepared_pairs",
        "readers",
        "store_writer",
        "token_store",
    ],
    "model.nn": [
        "kernels.nf4",
        "quantized",
        "flat_batch flat_params gradient_parts packed_layout philox",
        "kernels.dropout kernels.sums",
        "kernels",
        "activations attention dropout loss",
        "adapted_product layers",
        "lora",
        "base",
        "footprint",
        "t5.sizes t5.batch t5.position_bias t5.footprint qwen.sizes qwen.batch qwen.rotary qwen.footprint",
        "t5.decode t5.warm_up t5.huggingface qwen.decode qwen.huggingface",
        "t5.network qwen.network",
        "t5.family qwen.family",
        "model_card registry",
        "tensor_files",
        "weights_io",
        "adapter_io other_formats",
    ],
    "model.generate": ["sampling", "screen slots", "engine"],
    "model.memory": [
        "estimate step_time",
        "plan",
        "oom_policy",
    ],
    "model.train": [
        "flat_optimizer fixed_shards lr_schedule orthogonal reduction run_length spike_guard weighted_loss",
        "adamw adamw_rms",
        "muon objectives.base objectives.dialogues objectives.pairs",
        "optim",
        "cuda_graphs examples footprint objectives.registry",
        "evaluate loader",
        "commit derive gradients",
        "step",
        "dry_run",
    ],
    "model.run": [
        "console durations journal sensors status terminal_log train_state words",
        "checkpoint curves figures log messages",
        "checkpointer plots run_dir trackers view",
        "drawing screen summary",
        "run_log",
        "export watch",
        "best_model",
        "live",
    ],
    "model.commands": [
        "help_zh model_cache option_names",
        "no_model",
        "usage",
        "options",
        "adapter guide_flags network same_run tokenising",
        "origin",
        "length_sample space",
        "setup",
        "answering data_report connection decoding_thread doctor plan_report request_body server_metrics",
        "openai_api",
        "server",
    ],
    "bench": [
        "children clock mutations runs",
        "corpus memory_fit",
        "fuzz_checkpoint loops lora",
        "fuzz_strangers nf4 report several_machines",
        "fuzz_targets",
        "",
    ],
    "scripts": [""],
    "train_low_mem": [""],
}
APPLICATIONS = ("bench", "scripts", "train_low_mem")
MAX_PARAMETERS = 6  # Triton kernels excepted
OPTIONS = {"TrainConfig", "load_config"}
WITHOUT_OPTIONS = ("model.runtime", "model.data", "model.nn", "model.generate", "model.memory", "model.run")
TENANTS_WORDS = re.compile(r"t5|prompt|response", re.IGNORECASE)
IMPORT_BY_NAME = {"__import__", "import_module"}
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
PLACES_OF_WORDS = (
    "model.data.readers", "model.data.dialogue", "model.data.columns", "model.data.cleaning",
    "model.data.prepared_pairs", "model.nn.t5", "model.nn.registry",
    "model.train.objectives.pairs", "model.train.objectives.registry", "model.run.words", "model.commands",
)  # fmt: skip
# {library: the only modules that may import it}
ALLOWED_IMPORTERS = {
    "accelerate": "model.runtime.distributed model.run.trackers",
    "matplotlib": "model.run.plots model.commands.data_report bench",
    "transformers": "model.nn.t5.huggingface model.nn.qwen.huggingface model.data.template_process scripts bench",
    "tokenizers": "model.data.tokenizer model.data.tokenizer_file model.data.tokenizer_training",
    "ctranslate2": "model.nn.other_formats bench",
    "datasets": "bench",
    "rensa": "model.data.near_duplicates",
    "starlette": "model.commands.server",
    "prometheus_client": "model.commands.server_metrics",
    "uvicorn": "scripts.serve model.commands.connection",
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


def misplaced_words(path, root):
    """Yield a complaint about each word of a family or an objective outside its places."""
    name = name_of(path, root)
    is_kept = name.startswith("model.") or name == "train_low_mem"
    if not is_kept or any(within(name, place) for place in PLACES_OF_WORDS):
        return
    for line, text in [(1, name), *words_of(path)]:
        if found := TENANTS_WORDS.search(text):
            yield f"{name}:{line} says {found.group()!r}: only {', '.join(PLACES_OF_WORDS)} may"


CHECKS = (faults_of, long_signatures, options_below, misplaced_words)


@pytest.mark.parametrize("path", sources(ROOT), ids=lambda path: name_of(path, ROOT))
def test_a_module_keeps_to_its_floor_and_its_words(path):
    assert not [fault for check in CHECKS for fault in check(path, ROOT)]


@pytest.mark.parametrize(
    "module, text, fault",
    [
        ("model/data/readers.py", "from model.train.step import train_steps", "not above it in ROOMS"),
        ("model/runtime/atomic_io.py", "import model.runtime.distributed", "not above it in ROOMS"),
        ("model/nn/loss.py", "def f():\n    from model.nn.base import LanguageModel", "not above it in ROOMS"),
        ("model/nn/attention.py", "from model.nn import loss", "not above it in ROOMS"),
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
        ("model/train/step.py", "def f(a, b, c, d, e, f, g):\n    pass", "f takes 7 parameters"),
        ("bench/loss.py", "def f(a, b, c, *, d, e, f, g):\n    pass", "f takes 7 parameters"),
        ("model/train/step.py", "def f(a, b, c, d, e, f, *rest):\n    pass", "f takes 7 parameters"),
        ("model/train/step.py", "def f(a, b, c, *, d, e, f, **rest):\n    pass", "f takes 7 parameters"),
        ("model/commands/server.py", "async def f(a, b, c, d, e, f, g):\n    pass", "f takes 7 parameters"),
        ("model/train/step.py", "f = lambda a, b, c, d, e, f, g: a", "lambda takes 7 parameters"),
        ("model/memory/plan.py", "from config import TrainConfig", "takes a TrainConfig"),
        ("model/nn/loss.py", "def f(config):\n    pass", "takes a TrainConfig"),
        ("model/nn/loss.py", "import config\nx = config.TrainConfig()", "takes a TrainConfig"),
        ("model/nn/loss.py", "def f(run: 'TrainConfig'):\n    pass", "takes a TrainConfig"),
        ("model/memory/plan.py", "from config import load_config", "takes a TrainConfig"),
        ("model/run/live.py", "def live(ranks, config):\n    pass", "takes a TrainConfig"),
        ("model/train/step.py", "start = prompt_ids", "says 'prompt'"),
        ("model/data/sampler.py", "# the longest response", "says 'response'"),
        ("model/memory/plan.py", 'def f():\n    """The bytes of a T5."""', "says 'T5'"),
        ("model/run/journal.py", "keys = ['prompt_tokens']", "says 'prompt'"),
        ("model/run/journal.py", "key = f'{1}response_ids'", "says 'response'"),
        ("model/memory/plan.py", "def loadT5(umt5):\n    pass", "5'"),
        ("model/memory/plan.py", 'async def f():\n    """A prompt."""', "says 'prompt'"),
        ("train_low_mem.py", "prompt = 1", "says 'prompt'"),
    ],
)
def test_a_planted_violation_is_found(tmp_path, module, text, fault):
    path = tmp_path / module
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")
    found = [words for source in sources(tmp_path) for check in CHECKS for words in check(source, tmp_path)]
    assert found and all(fault in words for words in found)


def test_a_message_for_people_may_say_prompt(tmp_path):
    path = tmp_path / "model" / "run" / "journal.py"
    path.parent.mkdir(parents=True)
    path.write_text("raise ValueError(f'{1} pairs share a prompt')\n")
    assert not list(misplaced_words(path, tmp_path))


def test_each_init_file_holds_only_a_docstring():
    for folder in {path.parent for path in sources(ROOT) if ROOT / "model" in path.parents}:
        (only,) = ast.parse((folder / "__init__.py").read_text(encoding="utf-8")).body
        assert isinstance(only, ast.Expr) and len(only.value.value) > 40, folder


def test_config_needs_only_the_standard_library():
    for other in imports_of(ROOT / "config.py"):
        assert other.split(".")[0] in sys.stdlib_module_names, f"config.py imports {other}"


def test_rooms_name_only_modules_that_exist():
    for room, lines in ROOMS.items():
        folder = ROOT.joinpath(*room.split("."))
        for name in " ".join(lines).split():
            path = folder.joinpath(*name.split("."))
            assert path.is_dir() or path.with_suffix(".py").exists(), f"{room}.{name}"
