"""Writes a trained model again: with bf16 weights, for CTranslate2, fast on CPUs, or for llama.cpp and Ollama (gguf).

python scripts/export.py MODEL_DIR --to bf16|ctranslate2|gguf [--output_dir DIR] [--quantization int8] [--type f16]
    [--overwrite]

MODEL_DIR is a Hugging Face directory or a run directory (its best/, else its last/). Exit codes: 0 written, 2 refused,
1 disk, or CTranslate2 or gguf is not installed.
"""

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from model.runtime.environment import explain_missing_packages  # noqa: E402

explain_missing_packages()
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # reads only local files

from model.commands.option_names import ScriptParser  # noqa: E402
from model.display.catalogue import texts_here  # noqa: E402

FORMS = ("bf16", "ctranslate2", "gguf")
TYPES = ("f32", "f16", "bf16", "q8_0")
QUANTIZATIONS = ("int8", "int8_float32", "int16", "float16", "bfloat16", "float32")


def parse_options() -> argparse.Namespace:
    parser = ScriptParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("model_dir", type=Path, metavar="MODEL_DIR")
    parser.add_argument("--to", required=True, choices=FORMS)
    parser.add_argument("--output_dir", type=Path, metavar="DIR", help="default: MODEL_DIR-FORM")
    parser.add_argument("--quantization", default="int8", choices=QUANTIZATIONS, help="of ctranslate2 (%(default)s)")
    parser.add_argument("--type", default="f16", choices=TYPES, help="of the weights of gguf (%(default)s)")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing directory")
    return parser.parse_args()


def export(options: argparse.Namespace) -> Path:
    """Write the model; returns its new directory. Raises ValueError if that exists already and may not be replaced."""
    source = options.model_dir.resolve()
    target = options.output_dir or source.with_name(f"{source.name}-{options.to}")
    if target.exists() and not options.overwrite:
        raise ValueError(f"--output_dir={target}: it is there already; give another name, or add --overwrite")
    if target.resolve() in (source, *source.parents):
        raise ValueError(f"--output_dir={target}: the model itself lies there; give another name")
    from model.formats.conversions import to_bf16, to_ctranslate2, to_gguf  # takes seconds

    if options.to == "bf16":
        to_bf16(source, target)
    elif options.to == "gguf":
        to_gguf(source, target, options.type)
    else:
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        to_ctranslate2(source, target, options.quantization)
    return target


def main() -> int:
    options = parse_options()
    try:
        target = export(options)
    except (ValueError, RuntimeError, OSError) as error:
        print(f"export: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    mib = sum(path.stat().st_size for path in target.iterdir()) / 2**20
    print(texts_here()("export.written", directory=target, size=mib, form=options.to, readme=target / "README.md"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
