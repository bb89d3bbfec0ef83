"""Convert a model's SentencePiece tokenizer to the tokenizer.json that training reads, once and offline.

    python scripts/convert_tokenizer.py MODEL_DIR

transformers converts it (pip install -e '.[convert]'). The file is written beside the weights; in tokenizer_config.json
only the names of eos, pad and unknown token are added where they are missing.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # only local files are read

from model.commands.option_names import ScriptParser  # noqa: E402
from model.data.tokenizer import load_tokenizer  # noqa: E402
from model.run.messages import texts_here  # noqa: E402
from model.runtime.json_stream import read_object  # noqa: E402
from model.runtime.terminal import printable_lines  # noqa: E402

ROLES = ("eos_token", "pad_token", "unk_token")


def convert(directory: Path) -> str:
    """Write tokenizer.json; returns what was done. Raises ValueError if there is nothing to convert, or not as it was.

    RuntimeError without the packages that this needs.
    """
    if (directory / "tokenizer.json").exists():
        raise ValueError(f"{directory} has a tokenizer.json already: nothing to convert")
    if not any(directory.glob("*.model")):
        raise ValueError(
            f"{directory} has no SentencePiece model (spiece.model): copy the model's tokenizer files there"
        )
    try:
        import google.protobuf  # noqa: F401  # transformers reads the model with it
        import sentencepiece  # noqa: F401
        from transformers import AutoTokenizer
    except ImportError as error:
        raise RuntimeError(f"{error}: pip install -e '.[convert]'") from None
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except (OSError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{directory} cannot be read as a tokenizer: {error!s:.500}") from None
    settings = directory / "tokenizer_config.json"
    known = read_object(settings) if settings.is_file() else {}
    named = {role: str(token) for role in ROLES if (token := getattr(tokenizer, role)) is not None}
    with tempfile.TemporaryDirectory(dir=directory) as draft:
        tokenizer.save_pretrained(draft)
        settings.write_text(json.dumps(named | known, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(Path(draft, "tokenizer.json"), directory / "tokenizer.json")
    converted = load_tokenizer(directory)
    path, fingerprint = directory / "tokenizer.json", converted.fingerprint
    return texts_here()("tokenizer.converted", path=path, count=converted.vocab_size, fingerprint=fingerprint)


def main(words: list[str]) -> int:
    parser = ScriptParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory")
    options = parser.parse_args(words)
    try:
        print(convert(Path(options.directory)))
    except (ValueError, RuntimeError, OSError) as error:
        print(printable_lines(str(error)), file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
