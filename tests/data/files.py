"""Writes small data files and reads them, for the tests of this folder."""

import json
import re
import string
from collections import Counter

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from model.data.readers import read_conversations
from model.data.t5_text import pairs_of as learnt_pairs
from model.data.tokenizer import PROBE, load_tokenizer


def write(path, data):
    """Write bytes or text; returns the path."""
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def write_json(path, value):
    return write(path, json.dumps(value, ensure_ascii=False, indent=1))


def write_json_lines(path, rows):
    return write(path, "\n".join(json.dumps(row, ensure_ascii=False) for row in rows))


def read_pairs(path, *columns, ignored=None, **options):
    """Yield (question, answer) of each learnt answer of a file."""
    ignored = Counter() if ignored is None else ignored
    pairs = learnt_pairs(read_conversations(path, *columns, ignored=ignored, **options), ignored, single_turn=True)
    return ((question, answer) for question, answer, _ in pairs)


def without_shares(message):
    """What describe_ignored says, without the shares of the characters."""
    return re.sub(r", \d+% of their characters", "", message)


def pairs_of(path, **columns):
    return list(read_pairs(path, **columns))


def refusal(path, **columns):
    """The message of the ValueError that reading the file raises; it names the file."""
    with pytest.raises(ValueError) as caught:
        pairs_of(path, **columns)
    assert str(path) in str(caught.value)
    return str(caught.value)


def save_unigram(folder, letters=string.ascii_letters + string.punctuation, prepend_scheme="always"):
    """A tokenizer as T5 has it, written to `folder` and loaded: Unigram, spaces as ▁, <pad>, </s> and sentinels."""
    names = ("<pad>", "</s>", "<unk>")
    others = [f"filler{number}" for number in range(300)]
    texts = [*names, "▁", *dict.fromkeys(PROBE + letters), *others]
    backend = Tokenizer(models.Unigram([(text, -float(place)) for place, text in enumerate(texts)], unk_id=2))
    backend.normalizer = normalizers.Replace("\n", " ")
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme)
    backend.decoder = decoders.Metaspace(prepend_scheme=prepend_scheme)
    backend.add_special_tokens([*names, *(f"<extra_id_{number}>" for number in range(3))])
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    settings = dict(tokenizer_class="PreTrainedTokenizerFast", pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
    write_json(folder / "tokenizer_config.json", settings)
    return load_tokenizer(folder)
