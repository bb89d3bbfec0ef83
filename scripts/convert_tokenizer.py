"""Convert a model's SentencePiece tokenizer to the tokenizer.json that training reads, once and offline.

    python scripts/convert_tokenizer.py MODEL_DIR

transformers converts it (pip install -e '.[convert]'), and the bytes of characters outside the vocabulary are kept. The
result is compared with SentencePiece on texts of many kinds before it is written beside the weights; where one differs,
nothing is written. In tokenizer_config.json only the names of eos, pad and unknown token are added where they are
missing; with byte fallback tokenizer_class becomes PreTrainedTokenizerFast, for T5Tokenizer leaves it out.
"""

import argparse
import json
import os
import random
import sys
import tempfile
import unicodedata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from model.runtime.environment import explain_missing_packages  # noqa: E402

explain_missing_packages()
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # only local files are read

from model.commands.option_names import ScriptParser  # noqa: E402
from model.data.tokenizer import load_tokenizer  # noqa: E402
from model.display.catalogue import texts_here  # noqa: E402
from model.runtime.json_stream import read_object  # noqa: E402
from model.runtime.terminal import printable_lines  # noqa: E402

ROLES = ("eos_token", "pad_token", "unk_token")
TEXTS = (
    "", " ", "今天天气真好，我们去公园吧。", "It's 25.6 °C – isn't it?", "café cafe\u0301 naïve Ærø ﬁn ｆｕｌｌ",
    "😀 👍🏽 👨\u200d👩\u200d👧 🇨🇳 1️⃣", "龘靐齉 𠀀𪚥 㐀",
    "がぎ か\u3099 ﾊﾝｶｸ 한국어 \u1112\u1161\u11ab Vie\u0323\u0302t",
    "Привет мир, Ελλάδα, مرحبا ﷺ, नमस्ते, ไทย", "  a   b \t c\n\n d\r\n ", "\x01\x02\x1b[0m\x7f\x9f\ue000\U0010ffff",
    "a\u00a0b\u2003c\u3000d\u2028e\u0085f\u200bg\ufeffh", "x = {'a': [1, 2]}; // <br/> </s> <0x41> [MASK] \\n",
    "!" * 300, "哈" * 3000, "word " * 2000,
)  # fmt: skip
RANGES = ((0x20, 0x7E), (0xA0, 0x24F), (0x370, 0x6FF), (0x900, 0xE7F), (0x2000, 0x27BF), (0x3000, 0x30FF))
RANGES += ((0x3400, 0x9FFF), (0xAC00, 0xD7A3), (0xF900, 0xFFEF), (0x1F300, 0x1FAFF), (0x20000, 0x2A6DF), (1, 0x1F))
NUM_DRAWN = 2000  # texts
# The package tokenizers loses some of these accents unless they are composed first.
ACCENTS = "か\u3099 vie\u0323\u0302t"


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
        import sentencepiece
        from transformers import AutoTokenizer
    except ImportError as error:
        raise RuntimeError(f"{error}: pip install -e '.[convert]'") from None
    source = min(directory.glob("*.model"), key=lambda path: (path.name != "spiece.model", path.name))
    try:
        original = sentencepiece.SentencePieceProcessor(model_file=str(source))
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
        content = json.loads(tokenizer.backend_tokenizer.to_str())
    except (OSError, RuntimeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{directory} cannot be read as a tokenizer: {error!s:.500}") from None
    _follow(original, content)
    path = directory / "tokenizer_config.json"
    known = read_object(path) if path.is_file() else {}
    settings = {role: str(token) for role in ROLES if (token := getattr(tokenizer, role)) is not None} | known
    settings |= dict(tokenizer_class="PreTrainedTokenizerFast") if _has_bytes(original) else {}
    with tempfile.TemporaryDirectory(dir=directory) as draft:
        for name, values in (("tokenizer.json", content), (path.name, settings)):
            Path(draft, name).write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        converted = load_tokenizer(draft)
        _compare(converted, original, directory)
        for name in (path.name, "tokenizer.json"):
            os.replace(Path(draft, name), directory / name)
    known = dict(path=directory / "tokenizer.json", count=converted.vocab_size, fingerprint=converted.fingerprint)
    return texts_here()("tokenizer.converted", **known)


def _has_bytes(original):
    return any(map(original.is_byte, range(original.get_piece_size())))


def _follow(original, content: dict) -> None:
    """Have the `content` of a tokenizer.json split texts as the SentencePiece model does where transformers' does not.

    SentencePiece knows no white space but the space once a text is normalised; it composes letters and their accents;
    a Unigram model may fall back to bytes. An accent behind a letter that has no form with it may still be lost.
    """
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto.FromString(original.serialized_model_proto())
    before = content["pre_tokenizer"] or {}
    steps = before.get("pretokenizers", [])
    if [step["type"] for step in steps] == ["WhitespaceSplit", "Metaspace"]:
        content["pre_tokenizer"] = steps[1]
        spaces = [(r"\A +| +\z", ""), (" {2,}", " ")] if model.normalizer_spec.remove_extra_whitespaces else []
        rules = [dict(type="Replace", pattern=dict(Regex=old), content=new) for old, new in spaces]
        first = [content["normalizer"]] if content["normalizer"] else []
        if unicodedata.normalize("NFC", ACCENTS).replace(" ", "▁") in original.normalize(ACCENTS):
            first.insert(0, dict(type="NFC"))
        content["normalizer"] = dict(type="Sequence", normalizers=[*first, *rules])
    if _has_bytes(original) and content["model"]["type"] == "Unigram":
        content["model"]["byte_fallback"] = True
        content["decoder"] = dict(type="Sequence", decoders=[dict(type="ByteFallback"), content["decoder"]])


def _joins(letter):
    """Whether this is an accent, a skin tone or the like, which are part of the character before them."""
    parts = unicodedata.normalize("NFKC", letter)
    return any(kind == "Sk" or kind[0] == "M" for kind in map(unicodedata.category, parts))


def _compare(converted, original, directory: Path) -> None:
    """Raise ValueError unless the converted tokenizer gives SentencePiece's ids for texts of many kinds."""
    draw = random.Random(0)
    texts, num_pieces = list(TEXTS), original.get_piece_size()
    for _ in range(NUM_DRAWN):
        letters = [chr(draw.randint(*draw.choice(RANGES))) for _ in range(draw.randint(1, 12))]
        letters = [
            letter for letter in letters if letter != "▁" and not _joins(letter)
        ]  # TEXTS has those that texts have
        pieces = [original.id_to_piece(draw.randrange(num_pieces)).replace("▁", " ") for _ in range(4)]
        texts.append("".join(draw.sample([*letters, *(piece for piece in pieces if piece[:1] != "<")], k=len(letters))))
    for text, ids, expected in zip(texts, converted.encode_batch(texts), original.encode(texts), strict=True):
        if ids != expected:
            raise ValueError(
                f"{directory}: SentencePiece gives {expected!s:.80} for {text!r:.80}, and the converted tokenizer "
                f"{ids!s:.80}: nothing was written; use a model that comes with a tokenizer.json, or train a tokenizer "
                "with scripts/train_tokenizer.py"
            )


def main(words: list[str]) -> int:
    parser = ScriptParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    options = parser.parse_args(words)
    try:
        print(convert(options.directory))
    except (ValueError, RuntimeError, OSError) as error:
        print(printable_lines(str(error)), file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
