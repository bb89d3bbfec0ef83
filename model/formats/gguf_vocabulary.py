"""A byte-level tokenizer as a GGUF file names it, and whether llama.cpp gives its ids.

llama.cpp knows how a tokenizer cuts texts by a name alone. A tokenizer has the name whose rules give its ids for
NUM_TEXTS texts; one that differs from all of them is refused with a text that shows it. llama.cpp composes no
characters (NFC), so the texts are composed, as almost all text is.
"""

import json
import random
import unicodedata
from dataclasses import dataclass
from functools import cached_property

from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers

from model.data.byte_level import SPLIT_PATTERN
from model.data.tokenizer import ChatTokenizer
from model.data.tokenizer_file import load_settings

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # types of tokens in a GGUF file
NUM_TEXTS, MOST_PIECES, MAX_PIECES = 1_000, 8, 5_000
# {llama.cpp's name: (the pattern of its pieces, whether a piece that is a token is one whatever the merges say)}
RULES = {
    "qwen2": (SPLIT_PATTERN, False),
    "llama-bpe": (SPLIT_PATTERN.replace(r"|\p{N}|", r"|\p{N}{1,3}|"), True),
    "gpt-2": (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+", False),
}
# what rules treat in different ways: numbers, contractions, white space, scripts, marks, signs
PIECES = (
    *(" ", "  ", "   ", "\t", " \t ", "\n", "\n\n", "\r\n", " \n", "\n  ", "\u3000", "\u00a0", "\u200b"),
    *("\u0301a", "\u202e", "\ufeff", "👨\u200d👩\u200d👧"),
    *"0 12 345 6789 3.14 ２０２４ ½ Ⅷ 's 'S 'Re 'LL n't a Hello WORLD naïve straße 😀 👍🏽 🇨🇳 № ™ √2 x² 𝒳 𠀀".split(),
    *"你好 天气 龘 の カタカナ 한국어 привет Ελλάδα עברית العربية हिन्दी ไทย ខ្មែរ ệ".split(),
    *"。 ， ！？ 「」 ... —— - _ ++ == < </ > |> [x] { } @#$% http:// // \\n \" '".split(),
)


@dataclass(frozen=True)
class GgufVocabulary:
    """What a GGUF file says of a tokenizer with so many `rows` of an embedding."""

    tokenizer: ChatTokenizer
    rows: int

    @cached_property
    def state(self) -> dict:
        """The tokenizer as its file has it."""
        return json.loads(self.tokenizer.backend.to_str())

    @cached_property
    def rules(self) -> str:
        """The one of RULES that gives this tokenizer's ids; raises ValueError with a text if none does."""
        if self.rows < self.tokenizer.vocab_size:
            raise ValueError(
                f"the tokenizer in {self.tokenizer.directory} has {self.tokenizer.vocab_size} tokens and the model "
                f"{self.rows}: give the model its own tokenizer"
            )
        self._check_bytes()
        texts = texts_for(self.tokenizer)
        differing = {name: self._differing(name, texts) for name in RULES}
        found = [name for name, text in differing.items() if text is None]
        if not found:
            shown = max(differing.values(), key=texts.index)
            raise ValueError(
                f"the tokenizer in {self.tokenizer.directory} cuts texts as no rules of llama.cpp that are known here "
                f"({', '.join(RULES)}): its ids of {shown!r:.200} differ; a GGUF file would answer other questions"
            )
        return found[0]

    @property
    def tokens(self) -> list[str]:
        """The text of each row of the embedding."""
        known = {number: token for token, number in self.tokenizer.backend.get_vocab().items()}
        return [known.get(row, f"[PAD{row}]") for row in range(self.rows)]

    @property
    def types(self) -> list[int]:
        """The type of each row of the embedding."""
        added = self.tokenizer.backend.get_added_tokens_decoder()
        known = set(self.tokenizer.backend.get_vocab().values())
        kinds = {number: CONTROL if token.special else USER_DEFINED for number, token in added.items()}
        return [kinds.get(row, NORMAL if row in known else UNUSED) for row in range(self.rows)]

    @property
    def merges(self) -> list[str]:
        """The merges in order, both sides with a space between."""
        return [pair if isinstance(pair, str) else " ".join(pair) for pair in self.state["model"]["merges"]]

    @property
    def bos_id(self) -> int:
        """The token that begins a text, or the pad token where none does: llama.cpp would take the id 11."""
        named = load_settings(self.tokenizer.directory).get("bos_token")
        text = named.get("content") if isinstance(named, dict) else named
        number = self.tokenizer.backend.token_to_id(text) if isinstance(text, str) else None
        return self.tokenizer.pad_id if number is None else number

    @property
    def adds_bos(self) -> bool:
        """Whether the tokenizer puts `bos_id` before a text."""
        return self.tokenizer.backend.encode("a").ids[:1] == [self.bos_id]

    def as_engine(self, name: str) -> Tokenizer:
        """The tokenizer that llama.cpp makes of this vocabulary by the rules of this name."""
        pattern, whole_pieces = RULES[name]
        vocab, types = self.tokenizer.backend.get_vocab(), self.types
        merges = [tuple(pair.split(" ")) for pair in self.merges]
        engine = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=whole_pieces))
        cut = pre_tokenizers.Split(Regex(pattern), "isolated")
        engine.pre_tokenizer = pre_tokenizers.Sequence(
            [cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        marks = sorted((number, token) for token, number in vocab.items() if types[number] != NORMAL)
        engine.add_tokens([AddedToken(token, normalized=False) for _, token in marks])
        return engine

    def _check_bytes(self):
        model, alphabet = self.state["model"], pre_tokenizers.ByteLevel.alphabet()
        missing = (
            [letter for letter in alphabet if letter not in model["vocab"]] if model["type"] == "BPE" else alphabet
        )
        if missing:
            raise ValueError(
                f"the tokenizer in {self.tokenizer.directory} is not byte-level (its model is {model['type']}, "
                f"{len(missing)} of 256 bytes are missing): llama.cpp would give other ids for every text; a decoder "
                "for GGUF is trained with a tokenizer of scripts/train_tokenizer.py --kind=byte_level"
            )

    def _differing(self, name, texts):
        """The first text for which the rules of this name give other ids; None if there is none."""
        engine, ours = self.as_engine(name), self.tokenizer.backend
        pairs = zip(
            texts,
            engine.encode_batch(texts, add_special_tokens=False),
            ours.encode_batch(texts, add_special_tokens=False),
            strict=True,
        )
        return next((text for text, there, here in pairs if there.ids != here.ids), None)


def texts_for(tokenizer: ChatTokenizer) -> list[str]:
    """NUM_TEXTS composed texts of PIECES, of the tokenizer's own tokens and of its added ones; the same each time."""
    draw = random.Random(0)
    numbers = draw.sample(range(tokenizer.vocab_size), min(MAX_PIECES, tokenizer.vocab_size))
    own = [text for text in map(tokenizer.backend.decode, ([number] for number in numbers)) if "\ufffd" not in text]
    added = [token.content for token in tokenizer.backend.get_added_tokens_decoder().values()]
    texts = []
    for number in range(NUM_TEXTS):
        pieces = draw.choices(PIECES, k=draw.randint(1, MOST_PIECES)) + draw.choices(
            own or PIECES, k=draw.randint(0, 6)
        )
        pieces += draw.choices(added, k=number % 4 == 0) if added else []
        draw.shuffle(pieces)
        texts.append(unicodedata.normalize("NFC", "".join(pieces)))
    return texts
