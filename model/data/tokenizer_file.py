"""Tokenizer files of strangers: read with limits, and every fault of theirs is a ValueError that names the file.

A file may hold rules that are slow on long texts; what no rule can do is run code, or make a short text endless.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tokenizers import Tokenizer

from model.runtime.json_stream import read_object

MAX_VOCAB_SIZE = 1 << 20
MAX_RULE_TEXTS, MAX_REPLACEMENT_CHARS = 200, 64  # in normalizer, pre-tokenizer, post-processor and decoder


def load_backend(path: Path) -> Tokenizer:
    """The tokenizers package's object in a tokenizer.json, cutting a text always the same way and special tokens too.

    Raises ValueError for a file that is missing, too large, damaged, or holds what only an attack would.
    """
    if not path.is_file():
        foreign = next((other.name for other in path.parent.glob("*.model")), "")
        raise ValueError(
            f"no tokenizer at {path}: make one with "
            f"python scripts/train_tokenizer.py FILES --output_dir {path.parent} --vocab_size 8000"
            + (f"; old weights need their own: convert {foreign} (SentencePiece) to tokenizer.json" if foreign else "")
        )
    content = read_object(path)
    if not isinstance(content.get("model"), dict) or "vocab" not in content["model"]:
        raise ValueError(f"{path} has no model with a vocab: it must be a file saved by the tokenizers package")
    _check_rules({name: rules for name, rules in content.items() if name not in ("model", "added_tokens")}, path)
    content["model"].pop("dropout", None)  # it would cut the same text another way each time
    with refusing(path):
        backend = Tokenizer.from_str(json.dumps(content))
    ids = backend.get_vocab().values()
    if len(set(ids)) != len(ids) or max(ids, default=0) >= MAX_VOCAB_SIZE:
        raise ValueError(f"{path} gives an id twice, or one above {MAX_VOCAB_SIZE - 1:,}: copy it again")
    backend.encode_special_tokens = True
    backend.no_truncation()
    backend.no_padding()
    return backend


@contextmanager
def refusing(path: Path) -> Iterator[None]:
    """The library raises bare Exception for a file that it cannot use, and a panic of its code is not even that."""
    try:
        yield
    except (ValueError, MemoryError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise ValueError(f"{path} cannot be used as a tokenizer ({error}): copy it again") from None


def _check_rules(rules: object, path: Path) -> None:
    """Raise ValueError where a stranger's normalizer or decoder could make a short text endless."""
    texts = list(_texts(rules))
    replaced = [text for name, text in texts if name in ("content", "prepend", "replacement")]
    if len(texts) > MAX_RULE_TEXTS or any(len(text) > MAX_REPLACEMENT_CHARS for text in replaced):
        raise ValueError(
            f"{path}: its rules hold {len(texts)} texts, the longest replacement {max(map(len, replaced), default=0)} "
            f"characters: at most {MAX_RULE_TEXTS} and {MAX_REPLACEMENT_CHARS} are taken from others"
        )


def _texts(node: object, name: str = "") -> Iterator[tuple[str, str]]:
    """(key, text) of each text in a JSON value."""
    if isinstance(node, str):
        yield name, node
    elif isinstance(node, dict | list):
        for key, value in node.items() if isinstance(node, dict) else ((name, value) for value in node):
            yield from _texts(value, key)


def load_settings(directory: Path) -> dict:
    """What the files beside tokenizer.json say; raises ValueError where they ask for code of their own."""
    settings = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (directory / name).is_file():
            settings |= {key: value for key, value in read_object(directory / name).items() if value is not None}
    if "auto_map" in settings:
        raise ValueError(f"the tokenizer in {directory} needs code of its own (auto_map): only plain ones are loaded")
    return settings
