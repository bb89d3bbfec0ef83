"""Train, load and identify a tokenizer with the `tokenizers` package alone (transformers and torch are not imported).

A tokenizer trained here has these properties:
- decode(encode(text)) == text for every string of valid Unicode: a character outside the alphabet becomes byte tokens;
- no text is encoded as a special token such as [EOS] or a byte token such as <0x41>, even if it spells one;
- equal texts in equal order give an equal tokenizer;
- transformers' AutoTokenizer gives the same ids, and appends [EOS] when add_special_tokens is True.

A tokenizer from elsewhere can be loaded if its directory has a tokenizer.json and names its eos and pad tokens.
"""

import hashlib
import json
import logging
import random
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from model.data.tokenizer_file import library_errors_as_value_errors, load_backend, load_settings
from model.runtime.atomic_io import open_own

SPECIAL_TOKENS = ("[PAD]", "[EOS]", "[SEP]", "[BOS]", "[CLS]", "[MASK]", "[UNK]")
BYTE_TOKENS = tuple(f"<0x{byte:02X}>" for byte in range(256))
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "spiece.model",
    "chat_template.jinja",
)

MIN_VOCAB_SIZE = 300
MAX_ALPHABET = 8_000
# The merge table takes about 110 bytes of host memory per character of Chinese text.
MAX_TRAINING_CHARS = 32_000_000
# The trainer searches a whole run of letters again at every merge; slices bound its length.
MAX_SLICE_CHARS = 512

# Han characters, other letters, white space and other symbols never share a token. Each digit and each bracket is a
# token of its own, so that no merge can spell a special token or a byte token. The possessive ++ keeps the memory for
# long runs linear.
SPLIT_PATTERN = r"[<>\[\]]|\p{N}|\p{Han}++|[\p{L}\p{M}&&[^\p{Han}]]++|\s++|[^\s\p{L}\p{M}\p{N}<>\[\]]++"

PROBE = (
    "今天天气真好我想和朋友一起去公园走路你们觉得怎么样如果明天下雨就在家里看书听音乐做饭"
    "请问这个问题应该如何解决谢谢老师说学生要多读写每日工作时间从早上到晚间国人民大地方"
    "医生告诉他注意身体少吃油心情也很重要孩子高兴地笑了中文字可以表达所有意思"
)
MAX_PROBE_LOSS = 0.01

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ChatTokenizer:
    """A loaded tokenizer and the ids that training and generation need.

    vocab_size is the highest id plus one: the number of rows that an embedding needs.
    fingerprint covers everything that determines the ids of a text and does not change when the tokenizer is saved
    again.
    """

    backend: Tokenizer
    vocab_size: int
    pad_id: int
    eos_id: int
    fingerprint: str
    directory: Path

    def encode(self, text: str) -> list[int]:
        """Ids of the text; adds no EOS and parses no special tokens."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text, computed on all cores. Raises ValueError if a text is not a string of valid Unicode."""
        try:
            encodings = self.backend.encode_batch_fast(texts, add_special_tokens=False)
        except TypeError as error:
            raise ValueError(
                f"a text among {len(texts)} cannot be tokenized: each must be a string without lone surrogates "
                f"(half an emoji such as '\\ud83d'); clean the file with scripts/prepare_data.py"
            ) from error
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: list[int]) -> str:
        """Text of the ids, without special tokens."""
        return self.backend.decode(ids, skip_special_tokens=True)


def train_tokenizer(texts: Iterable[str], vocab_size: int, output_dir: str | Path) -> None:
    """Train a character-level BPE tokenizer with byte fallback on the texts and write it to output_dir.

    Reads the texts once, in at most about 4 GiB of memory: it trains on a uniform sample if there are more than
    MAX_TRAINING_CHARS characters. Raises ValueError if vocab_size or the amount of text is too small.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(f"vocab_size is {vocab_size}: it must be at least {MIN_VOCAB_SIZE}, for example 8000")
    backend = _learn(_sample_slices(texts), vocab_size)
    if backend.get_vocab_size() < MIN_VOCAB_SIZE:
        raise ValueError(
            f"the text is enough for only {backend.get_vocab_size()} tokens: at least {MIN_VOCAB_SIZE} are needed, "
            "give more text"
        )
    _save(backend, Path(output_dir))


def load_tokenizer(directory: str | Path) -> ChatTokenizer:
    """Load the tokenizer in a directory: one trained here, one from Hugging Face, or the tokenizer files of a model.

    Raises ValueError if files are missing or unreadable, the vocabulary is smaller than 300, no eos or pad token is
    named, the tokenizer needs custom code, or it loses more than 1 % of common Chinese characters.
    """
    directory = Path(directory)
    backend = load_backend(directory / "tokenizer.json")
    settings = load_settings(directory)
    pad_id = _special_id(backend, settings, "pad_token", directory)
    eos_id = _special_id(backend, settings, "eos_token", directory)
    vocab_size = 1 + max(backend.get_vocab().values())
    tokenizer = ChatTokenizer(backend, vocab_size, pad_id, eos_id, _fingerprint(backend), directory)
    with library_errors_as_value_errors(directory):
        _check_fitness(tokenizer)
    return tokenizer


def tokenizer_files(directory: str | Path) -> list[Path]:
    """Paths of the tokenizer files in a directory.

    In Hugging Face's cache the files of a snapshot are links into blobs/ of the same model, so a link may point there
    or into the directory itself. Raises ValueError for a link to anywhere else: following it could copy a file that
    is not part of the tokenizer.
    """
    directory = Path(directory)
    found = [directory / name for name in TOKENIZER_FILES if (directory / name).is_file()]
    real = directory.resolve()
    allowed = {real, real.parents[1] / "blobs"} if real.parent.name == "snapshots" else {real}
    for path in found:
        if path.is_symlink() and path.resolve().parent not in allowed:
            raise ValueError(
                f"{path} is a link to {path.resolve()}, outside the tokenizer's directory: copy the file itself there, "
                "or delete the link"
            )
    return found


def copy_tokenizer(directory: str | Path, target: str | Path) -> None:
    """Copy the tokenizer files of one directory into another, byte for byte; raises like `tokenizer_files`."""
    Path(target).mkdir(parents=True, exist_ok=True)
    for source in tokenizer_files(directory):
        copy = Path(target, source.name)
        if source.resolve() != copy.resolve():
            with open_own(source.resolve(), "rb") as theirs, open_own(copy, "wb") as ours:
                shutil.copyfileobj(theirs, ours)


def count_merged_tokens(tokenizer: ChatTokenizer) -> int:
    """Number of tokens of more than one character."""
    learnt = tokenizer.backend.get_vocab(with_added_tokens=False).keys() - {*SPECIAL_TOKENS, *BYTE_TOKENS}
    return sum(len(token) > 1 for token in learnt)


def _slices(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        text = text.encode("utf-8", "ignore").decode("utf-8")  # drops lone surrogates, which have no bytes in UTF-8
        for start in range(0, len(text), MAX_SLICE_CHARS):
            yield text[start : start + MAX_SLICE_CHARS]


def _sample_slices(texts: Iterable[str], max_chars: int = MAX_TRAINING_CHARS, seed: int = 0) -> list[str]:
    """All slices of the texts, or a uniform sample of max_chars/2 to max_chars characters if there are more.

    Each slice draws a random number in [0, 1) and stays in the sample while its number is below the sampling rate,
    which halves whenever the sample exceeds max_chars.
    """
    draw = random.Random(seed).random
    kept, kept_chars, seen_chars, rate = [], 0, 0, 1.0
    for piece in _slices(texts):
        seen_chars += len(piece)
        if (number := draw()) < rate:
            kept.append((number, piece))
            kept_chars += len(piece)
        while kept_chars > max_chars:
            rate /= 2
            kept = [entry for entry in kept if entry[0] < rate]
            kept_chars = sum(len(piece) for _, piece in kept)
    if rate < 1:
        logger.warning(
            "tokenizer learns from a sample of %s of %s characters (seed %d)",
            f"{kept_chars:,}",
            f"{seen_chars:,}",
            seed,
        )
    return [piece for _, piece in kept]


def _alphabet(slices: list[str], vocab_size: int) -> list[str]:
    """The most frequent characters, most frequent first; at most 45 % of the learnt tokens, so that most are merges."""
    size = (vocab_size - len(SPECIAL_TOKENS) - len(BYTE_TOKENS)) * 45 // 100
    counts = Counter(chain.from_iterable(slices))
    # The trainer's own limit breaks ties at random; sorting ties by character makes the result repeatable.
    return sorted(counts, key=lambda character: (-counts[character], character))[: min(size, MAX_ALPHABET)]


def _learn(slices: list[str], vocab_size: int) -> Tokenizer:
    backend = Tokenizer(models.BPE(unk_token="[UNK]", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(SPLIT_PATTERN), "isolated")
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    backend.post_processor = processors.TemplateProcessing(
        single="$A [EOS]", pair="$A [EOS] $B [EOS]", special_tokens=[("[EOS]", SPECIAL_TOKENS.index("[EOS]"))]
    )
    alphabet = _alphabet(slices, vocab_size)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[*SPECIAL_TOKENS, *BYTE_TOKENS],
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    backend.train_from_iterator(slices, trainer)
    return _without_special_bytes(backend)


def _without_special_bytes(backend: Tokenizer) -> Tokenizer:
    """The same tokenizer with byte tokens as ordinary tokens.

    They are special tokens during training, because only those get ids 7 to 262; decoding would leave them out.
    """
    state = json.loads(backend.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] in SPECIAL_TOKENS]
    return Tokenizer.from_str(json.dumps(state))


def _save(backend: Tokenizer, output_dir: Path) -> None:
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{f"{token[1:-1].lower()}_token": token for token in SPECIAL_TOKENS},
        "split_special_tokens": True,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    output_dir.mkdir(parents=True, exist_ok=True)
    backend.save(str(output_dir / "tokenizer.json"))
    (output_dir / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _special_id(backend: Tokenizer, settings: dict, role: str, directory: Path) -> int:
    """Id of the token that the settings name for a role such as eos_token; marks it as special, so decode omits it."""
    named = settings.get(role)
    token = named.get("content") if isinstance(named, dict) else named
    token_id = backend.token_to_id(token) if isinstance(token, str) else None
    if token_id is None:
        raise ValueError(
            f"{role} is {token!r} in {directory}/tokenizer_config.json: it must name a token of the vocabulary, "
            f'for example "{role}": "</s>"'
        )
    known = backend.get_added_tokens_decoder().get(token_id)
    if known is None or not known.special:
        backend.add_special_tokens([token])
    return token_id


def _fingerprint(backend: Tokenizer) -> str:
    # The backend's serialization, not the file's text: older files write the same merges in another form.
    state = json.loads(backend.to_str())
    parts = {name: state[name] for name in ("model", "added_tokens", "normalizer", "pre_tokenizer")}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _check_fitness(tokenizer: ChatTokenizer) -> None:
    """Raise ValueError if the vocabulary is too small or loses too much of PROBE."""
    if tokenizer.vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(
            f"the tokenizer in {tokenizer.directory} has {tokenizer.vocab_size} tokens: at least {MIN_VOCAB_SIZE} are "
            "needed (a failed conversion leaves only a few); train one with scripts/train_tokenizer.py"
        )
    # Counting unknown ids would miss tokenizers that drop unknown characters or fuse them into one id.
    survivors = set(tokenizer.decode(tokenizer.encode(PROBE)))
    lost = sum(character not in survivors for character in PROBE) / len(PROBE)
    if lost > MAX_PROBE_LOSS:
        raise ValueError(
            f"the tokenizer in {tokenizer.directory} loses {lost:.0%} of common Chinese characters: at most "
            f"{MAX_PROBE_LOSS:.0%} may be unknown; train one with scripts/train_tokenizer.py"
        )
