"""Trains a tokenizer: character-level BPE with byte fallback, or byte-level BPE (model/data/byte_level.py)."""

import json
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from model.data.byte_level import BYTE_LEVEL_TOKENS, SETTINGS, learn_byte_level
from model.data.tokenizer import BYTE_TOKENS, MODE_TOKENS, NUM_SENTINELS, ROLE_MARKS, SENTINEL, SPECIAL_TOKENS
from model.data.tokenizer_file import MAX_VOCAB_SIZE

MIN_LEARNT = 30  # tokens beside the first ones
MAX_ALPHABET = 8_000
# What merging begins with are symbols: characters, or bytes. The merge table takes about 110 bytes of host memory for
# each in Chinese text; the time grows with them too.
MAX_TRAINING_SYMBOLS = 32_000_000
# The trainer searches a whole run of letters again at every merge; slices bound its length.
MAX_SLICE_CHARS = 512

# Han characters, other letters, white space and other symbols never share a token. Each digit and each bracket is a
# token of its own, so that no merge can spell a special token or a byte token. The possessive ++ keeps the memory for
# long runs linear.
SPLIT_PATTERN = r"[<>\[\]]|\p{N}|\p{Han}++|[\p{L}\p{M}&&[^\p{Han}]]++|\s++|[^\s\p{L}\p{M}\p{N}<>\[\]]++"

logger = logging.getLogger(__name__)


def first_tokens(sentinels: int) -> list[str]:
    """The tokens that have the first ids, in this order, of a tokenizer of kind `character`."""
    return [*SPECIAL_TOKENS, *BYTE_TOKENS, *map(SENTINEL.format, range(sentinels)), *ROLE_MARKS, *MODE_TOKENS]


def train_tokenizer(
    texts: Iterable[str],
    vocab_size: int,
    output_dir: str | Path,
    kind: str = "character",
    sentinels: int = NUM_SENTINELS,
) -> None:
    """Train a tokenizer of one of KINDS on the texts and write it to output_dir.

    A tokenizer of kind `byte_level` has no `sentinels`.

    Reads the texts once, in at most about 4 GiB of memory: it trains on a uniform sample if there are more than
    MAX_TRAINING_SYMBOLS. Raises ValueError if vocab_size is too small or too large, or the text too short.
    """
    if not 0 <= sentinels < MAX_VOCAB_SIZE:
        raise ValueError(f"sentinels is {sentinels}: it must be from 0 on, for example {NUM_SENTINELS}")
    learn, settings, first, count_symbols = KINDS[kind]
    first = first(sentinels)
    if vocab_size < (least := len(first) + MIN_LEARNT):
        raise ValueError(f"vocab_size is {vocab_size}: it must be at least {least}, for example 8000")
    if vocab_size > MAX_VOCAB_SIZE:
        raise ValueError(f"vocab_size is {vocab_size}: it must be at most {MAX_VOCAB_SIZE}, for example 8000")
    backend = learn(_sample_slices(texts, count_symbols), vocab_size, first)
    if backend.get_vocab_size() < least:
        raise ValueError(
            f"the text is enough for only {backend.get_vocab_size()} tokens: at least {least} are needed, "
            "give more text"
        )
    output_dir = Path(output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    backend.save(str(output_dir / "tokenizer.json"))
    (output_dir / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _slices(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        text = text.encode("utf-8", "ignore").decode("utf-8")  # drops lone surrogates, which have no bytes in UTF-8
        for start in range(0, len(text), MAX_SLICE_CHARS):
            yield text[start : start + MAX_SLICE_CHARS]


def _sample_slices(
    texts: Iterable[str],
    count_symbols: Callable[[str], int] = len,
    max_symbols: int = MAX_TRAINING_SYMBOLS,
    seed: int = 0,
) -> list[str]:
    """All slices of the texts, or a uniform sample of max_symbols/2 to max_symbols symbols if there are more.

    Each slice draws a random number in [0, 1) and stays in the sample while its number is below the sampling rate,
    which halves whenever the sample exceeds max_symbols.
    """
    draw = random.Random(seed).random
    kept, kept_symbols, seen_chars, rate = [], 0, 0, 1.0
    for piece in _slices(texts):
        seen_chars += len(piece)
        if (number := draw()) < rate:
            kept.append((number, piece))
            kept_symbols += count_symbols(piece)
        while kept_symbols > max_symbols:
            rate /= 2
            kept = [entry for entry in kept if entry[0] < rate]
            kept_symbols = sum(count_symbols(piece) for _, piece in kept)
    if rate < 1:
        logger.warning(
            "tokenizer learns from a sample of %s of %s characters (seed %d)",
            f"{sum(len(piece) for _, piece in kept):,}",
            f"{seen_chars:,}",
            seed,
        )
    return [piece for _, piece in kept]


def _count_bytes(piece: str) -> int:
    return len(piece.encode())


def _alphabet(slices: list[str], num_learnt: int) -> list[str]:
    """The most frequent characters, most frequent first; at most 45 % of the learnt tokens, so that most are merges."""
    size = num_learnt * 45 // 100
    counts = Counter(chain.from_iterable(slices))
    # The trainer's own limit breaks ties at random; sorting ties by character makes the result repeatable.
    return sorted(counts, key=lambda character: (-counts[character], character))[: min(size, MAX_ALPHABET)]


def _learn_characters(slices: list[str], vocab_size: int, first: list[str]) -> Tokenizer:
    backend = Tokenizer(models.BPE(unk_token="[UNK]", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(SPLIT_PATTERN), "isolated")
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    backend.post_processor = processors.TemplateProcessing(
        single="$A [EOS]", pair="$A [EOS] $B [EOS]", special_tokens=[("[EOS]", SPECIAL_TOKENS.index("[EOS]"))]
    )
    alphabet = _alphabet(slices, vocab_size - len(first))
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=first,
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
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] not in BYTE_TOKENS]
    return Tokenizer.from_str(json.dumps(state))


CHARACTER_SETTINGS = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    **{f"{token[1:-1].lower()}_token": token for token in SPECIAL_TOKENS},
    "split_special_tokens": True,
    "clean_up_tokenization_spaces": False,
    "model_input_names": ["input_ids", "attention_mask"],
}
# how each kind learns from slices of texts, its tokenizer_config.json, the tokens that it has without learning (of a
# number of sentinels), and how many symbols a slice has
KINDS = {
    "character": (_learn_characters, CHARACTER_SETTINGS, first_tokens, len),
    "byte_level": (learn_byte_level, SETTINGS, lambda sentinels: BYTE_LEVEL_TOKENS, _count_bytes),
}
