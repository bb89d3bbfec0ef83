"""Imports go one way, functions take few parameters, options stay above, families and objectives in their places.

The sources are parsed with ast, so this needs neither torch nor a GPU and takes milliseconds.
"""

import ast
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.sources import bound_in, imports_of, name_of, names_of, sources, within

ROOT = Path(__file__).resolve().parents[1]

# A package imports only from those above it here; modules of one package form no circle of imports.
ROOMS = (
    "config", "model.runtime", "model.data", "model.nn", "model.formats", "model.generate", "model.memory",
    "model.train", "model.run", "model.display", "model.commands", "model.serve", "bench", "scripts", "train_low_mem",
)  # fmt: skip
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
    "tokenizers": "model.data.byte_level model.data.control_tokens model.data.tokenizer model.data.tokenizer_file "
    "model.data.tokenizer_training model.formats.gguf_vocabulary",
    "ctranslate2": "model.formats.conversions",
    "datasets": "model.data.hf_datasets bench",
    "gguf": "model.formats.gguf_file",
    "rensa": "model.data.near_duplicates",
    "starlette": "model.serve.server",
    "prometheus_client": "model.serve.server_metrics",
    "lm_eval": "model.serve.lm_eval_model scripts.lm_eval_model",
    "uvicorn": "scripts.serve model.serve.connection",
    "fire": "train_low_mem scripts bench",
    "pickle": "",
}


def place_of(module):
    """Index in ROOMS of the package that a module is in; None for other libraries."""
    return next((place for place, room in enumerate(ROOMS) if within(module, room)), None)


def faults_of(path, root):
    """Yield the problems with a module's place in ROOMS and with its imports."""
    mine = name_of(path, root)
    place = place_of(mine)
    if place is None:
        yield f"{mine} is in no package of ROOMS: move it into one"
        return
    for other in imports_of(path):
        theirs = place_of(other)
        both_applications = mine.split(".")[0] in APPLICATIONS and other.split(".")[0] in APPLICATIONS
        if theirs is not None and theirs > place and not both_applications:
            yield f"{mine} imports {other}, which is not above it in ROOMS"
        allowed = ALLOWED_IMPORTERS.get(other.split(".")[0])
        if allowed is not None and not any(within(mine, importer) for importer in allowed.split()):
            yield f"{mine} imports {other}: only {allowed or 'no module'} may"
    if found := IMPORT_BY_NAME & set(names_of(path)):
        yield f"{mine} uses {found.pop()}: write an import, which this test can read"


def circles(root):
    """Modules under `root` that import themselves, through others or not."""
    names = {name_of(path, root): path for path in sources(root)}
    above = {name: {other for other in imports_of(path) if other in names} for name, path in names.items()}
    while leaves := [name for name, others in above.items() if not others]:
        above = {name: others - set(leaves) for name, others in above.items() if name not in leaves}
    return sorted(above)


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
def test_a_module_keeps_to_its_room(path):
    assert not [fault for check in CHECKS for fault in check(path, ROOT)]


@pytest.mark.parametrize(
    "module, text, fault",
    [
        ("model/data/readers.py", "from model.train.step import train_steps", "not above it in ROOMS"),
        ("model/run/journal.py", "import train_low_mem", "not above it in ROOMS"),
        ("model/misc.py", "", "in no package of ROOMS"),
        ("model/misc/parts.py", "", "in no package of ROOMS"),
        ("helpers.py", "", "in no package of ROOMS"),
        ("tools/parts.py", "", "in no package of ROOMS"),
        ("model/nn/loss.py", "def f():\n    from model import train", "not above it in ROOMS"),
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


def test_no_module_imports_itself_through_others(tmp_path):
    assert not circles(ROOT)
    (tmp_path / "model").mkdir()
    for name, other in (("a", "model.b"), ("b", "model.c"), ("c", "model.a"), ("d", "model.a")):
        (tmp_path / "model" / f"{name}.py").write_text(f"def f():\n    import {other}\n")
    assert circles(tmp_path) == ["model.a", "model.b", "model.c", "model.d"]


def test_no_two_modules_or_classes_share_a_name_but_in_the_families():
    paths = [path for path in sources(ROOT) if within(name_of(path, ROOT), "model")]
    apart = [path for path in paths if path.parent.name not in ("t5", "decoder", "kernels")]
    modules = Counter(path.stem for path in apart)
    classes = Counter(
        node.name for path in apart for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    )  # fmt: skip
    assert not [name for name, count in (modules + classes).items() if count > 1]


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
