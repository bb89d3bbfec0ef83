"""Reads untrusted tokenizer files with limits; every defect is a ValueError that names the file.

The rules in a file may be slow on long texts, but they cannot run code or make a short text very long.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tokenizers import Tokenizer

from model.runtime.json_stream import read_object

MAX_VOCAB_SIZE = 1 << 20
# an auto_map that names no code: a file that is nowhere (model/data/tokenizer.py, keep_own_class)
NO_CODE = {"AutoTokenizer": [None, "load_without_trust_remote_code.NoCode"]}
NO_CODES = None, NO_CODE, {"AutoTokenizer": ["", ""]}  # the last in earlier exports
MAX_RULE_TEXTS, MAX_REPLACEMENT_CHARS = 200, 64  # in normalizer, pre-tokenizer, post-processor and decoder


def load_backend(path: Path) -> Tokenizer:
    """Load a tokenizer.json as the tokenizers package's Tokenizer.

    The result encodes a text the same way each time, and neither truncates nor pads. Raises ValueError for a file that
    is missing, too large, damaged or outside the limits.
    """
    if not path.is_file():
        has_sentencepiece = any(path.parent.glob("*.model"))
        raise ValueError(
            f"no tokenizer at {path}: "
            + (
                f"convert the SentencePiece model there: python scripts/convert_tokenizer.py {path.parent}"
                if has_sentencepiece
                else "make one with python scripts/train_tokenizer.py FILES --output_dir "
                f"{path.parent} --vocab_size 8000"
            )
        )
    content = read_object(path)
    if not isinstance(content.get("model"), dict) or "vocab" not in content["model"]:
        raise ValueError(f"{path} has no model with a vocab: it must be a file saved by the tokenizers package")
    _check_rules({name: rules for name, rules in content.items() if name not in ("model", "added_tokens")}, path)
    content["model"].pop("dropout", None)  # would encode the same text differently each time
    with library_errors_as_value_errors(path):
        backend = Tokenizer.from_str(json.dumps(content))
    ids = backend.get_vocab().values()
    if len(set(ids)) != len(ids) or max(ids, default=0) >= MAX_VOCAB_SIZE:
        raise ValueError(f"{path} has the same id twice, or an id above {MAX_VOCAB_SIZE - 1:,}: copy it again")
    backend.no_truncation()
    backend.no_padding()
    return backend


@contextmanager
def library_errors_as_value_errors(path: Path) -> Iterator[None]:
    """Turn what the tokenizers package raises for an unusable file into a ValueError that names the file.

    It raises a plain Exception; a panic of its Rust code is a BaseException.
    """
    try:
        yield
    except (ValueError, MemoryError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise ValueError(f"{path} cannot be used as a tokenizer ({error}): copy it again") from None


def _check_rules(rules: object, path: Path) -> None:
    """Raise ValueError if a normalizer or decoder could make a short text very long."""
    texts = list(_texts(rules))
    replacements = [text for name, text in texts if name in ("content", "prepend", "replacement")]
    if len(texts) > MAX_RULE_TEXTS or any(len(text) > MAX_REPLACEMENT_CHARS for text in replacements):
        raise ValueError(
            f"{path}: its rules hold {len(texts)} texts, the longest replacement "
            f"{max(map(len, replacements), default=0)} characters: "
            f"at most {MAX_RULE_TEXTS} and {MAX_REPLACEMENT_CHARS} are allowed; use another one"
        )


def _texts(node: object, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield (key, text) for each string in a JSON value."""
    if isinstance(node, str):
        yield name, node
    elif isinstance(node, dict | list):
        for key, value in node.items() if isinstance(node, dict) else ((name, value) for value in node):
            yield from _texts(value, key)


def load_settings(directory: Path) -> dict:
    """The settings in the files beside tokenizer.json; raises ValueError if they need custom code."""
    settings = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (directory / name).is_file():
            settings |= {key: value for key, value in read_object(directory / name).items() if value is not None}
    if settings.get("auto_map") not in NO_CODES:
        raise ValueError(f"the tokenizer in {directory} needs custom code (auto_map), which is not run; use another")
    return settings
