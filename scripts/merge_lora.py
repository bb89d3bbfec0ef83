"""Write an ordinary model directory: an adapter's base with the adapter added to it.

    python scripts/merge_lora.py ADAPTER_DIR OUTPUT_DIR

ADAPTER_DIR is an adapter's directory or the run directory of one (its best/, else its last/). The base is where the
adapter says; the tokenizer is the adapter's, else the base's. One matrix after the other is added to, in float32, and
written in the base's precision, so that a model larger than the memory can be merged.
"""

import argparse
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from model.runtime.environment import explain_missing_packages  # noqa: E402

explain_missing_packages()
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # only local files are read

from model.commands.option_names import ScriptParser  # noqa: E402
from model.data.tokenizer import load_tokenizer  # noqa: E402
from model.display.catalogue import texts_here  # noqa: E402
from model.formats.adapters import adapter_directory, export_merged, load_merged  # noqa: E402
from model.formats.model_card import read_card  # noqa: E402
from model.runtime.json_stream import read_object  # noqa: E402
from model.runtime.terminal import printable_lines  # noqa: E402

REMEDY = "name a directory with adapter_config.json, or a run directory with one"


def merge(path: Path, output: Path) -> str:
    """Write the merged model; returns what was done. Raises ValueError if there is no adapter or OUTPUT_DIR exists."""
    if not path.is_dir():
        raise ValueError(f"{path}: no such folder: {REMEDY}")
    directory = adapter_directory(path)
    if directory is None:
        raise ValueError(f"no adapter in {path}: {REMEDY}")
    if output.exists():
        raise ValueError(f"{output} exists already: name another directory")
    weights = load_merged(directory)
    settings = directory / "generation_config.json"
    generation = read_object(settings) if settings.is_file() else {}
    export_merged(weights, load_tokenizer(weights.tokenizer_dir), output, generation, read_card(directory))
    count = sum(tensor.numel() for tensor in weights.tensors.values())
    return texts_here()("merge.written", output=output, adapter=directory, count=count)


def main(words: list[str]) -> int:
    parser = ScriptParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("adapter", type=Path)
    parser.add_argument("output", type=Path)
    options = parser.parse_args(words)
    try:
        print(merge(options.adapter, options.output))
    except (ValueError, OSError) as error:
        print(printable_lines(str(error)), file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
