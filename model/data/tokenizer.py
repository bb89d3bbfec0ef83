"""Load and identify a tokenizer with the `tokenizers` package alone (transformers and torch are not imported).

A tokenizer trained here (model/data/tokenizer_training.py) has these properties:
- decode(encode(text)) == text for every string of valid Unicode: a character outside the alphabet becomes byte tokens;
- no text is encoded as a control token such as [EOS] (model/data/control_tokens.py) or a byte token such as <0x41>,
  even if it spells one;
- behind the byte tokens lie tokens for objectives and conversations, as which no text is encoded; older tokenizers lack
  them;
- equal texts in equal order give an equal tokenizer;
- transformers' AutoTokenizer gives the same ids, and appends [EOS] when add_special_tokens is True.

A tokenizer from elsewhere can be loaded if its directory has a tokenizer.json and names its eos and pad tokens.
"""

import hashlib
import json
import logging
import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer

from model.data.answer_parts import CALL, THOUGHT
from model.data.control_tokens import control_ids, text_encoder
from model.data.tokenizer_file import NO_CODE, NO_CODES, library_errors_as_value_errors, load_backend, load_settings
from model.runtime.atomic_io import open_own
from model.runtime.json_stream import read_object

SPECIAL_TOKENS = ("[PAD]", "[EOS]", "[SEP]", "[BOS]", "[CLS]", "[MASK]", "[UNK]")
BYTE_TOKENS = tuple(f"<0x{byte:02X}>" for byte in range(256))
SENTINEL, NUM_SENTINELS = "<extra_id_{}>", 100  # stand for the spans that span corruption takes out; T5 has so many
ROLE_MARKS = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")  # whose turn of a conversation follows; its end
MODE_TOKENS = ("[NLU]", "[NLG]", "[S2S]")  # kinds of denoising (Tay et al. 2022, UL2, arXiv 2205.05131)
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "spiece.model",
    "tokenizer.model",
    "chat_template.jinja",
)

GENERAL_CLASS = "PreTrainedTokenizerFast"  # of transformers: what tokenizer.json says
MIN_VOCAB_SIZE = 300
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

    `encoder` encodes texts, `backend` what a template writes: they differ in the control tokens, which no text gives.
    vocab_size is the highest id plus one: the number of rows that an embedding needs.
    fingerprint covers everything that determines the ids of a text and does not change when the tokenizer is saved
    again.
    """

    backend: Tokenizer
    encoder: Tokenizer
    vocab_size: int
    pad_id: int
    eos_id: int
    fingerprint: str
    directory: Path

    def encode(self, text: str) -> list[int]:
        """Ids of the text; adds no EOS, and gives no control token whatever the text spells."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text, computed on all cores. Raises ValueError if a text is not a string of valid Unicode."""
        try:
            encodings = self.encoder.encode_batch_fast(texts, add_special_tokens=False)
        except TypeError as error:
            raise ValueError(
                f"a text among {len(texts)} cannot be tokenized: each must be a string without lone surrogates "
                f"(half an emoji such as '\\ud83d'); clean the file with scripts/prepare_data.py"
            ) from error
        return [encoding.ids for encoding in encodings]

    def parse(self, text: str) -> list[int]:
        """Ids of what a template writes, as transformers gives them: added tokens in it are parsed."""
        return self.backend.encode(text, add_special_tokens=False).ids

    def control_ids(self) -> set[int]:
        """Ids of the added tokens that only a template writes."""
        return control_ids(self.backend)

    def decode(self, ids: list[int]) -> str:
        """Text of the ids, without special tokens but the marks of thoughts and calls, special or not."""
        if self._hidden_ids:
            ids = [token_id for token_id in ids if token_id not in self._hidden_ids]
        return self.backend.decode(ids, skip_special_tokens=not self._hidden_ids)

    @cached_property
    def _hidden_ids(self):
        """The special tokens that `decode` leaves out; none where the library's own choice is the same."""
        added = self.backend.get_added_tokens_decoder().items()
        special = {token_id: token.content for token_id, token in added if token.special}
        hidden = {token_id for token_id, content in special.items() if content not in (*THOUGHT, *CALL)}
        return frozenset(hidden if len(hidden) < len(special) else ())

    def decode_batch(self, rows) -> list[str]:
        """`decode` of each of `rows`, lists or arrays of ids, computed on all cores."""
        return self.backend.decode_batch([list(ids) for ids in rows], skip_special_tokens=True)


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
    state = json.loads(backend.to_str())
    fingerprint = _fingerprint(state)
    with library_errors_as_value_errors(directory):
        encoder = text_encoder(state)
        tokenizer = ChatTokenizer(backend, encoder, vocab_size, pad_id, eos_id, fingerprint, directory)
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


def keep_own_class(tokenizer: ChatTokenizer, directory: str | Path) -> None:
    """Let AutoTokenizer read this tokenizer from a directory that holds a copy of it beside a model of any type.

    For a qwen2 transformers 5 takes Qwen2Tokenizer, whatever tokenizer_config.json says, unless that names code; it
    would read every text as bytes that a tokenizer trained here does not have. With NO_CODE it takes the tokenizer as
    its file has it, and runs nothing; asked to trust code, it says that there is no such file.
    """
    path, model_config = Path(directory, "tokenizer_config.json"), Path(directory, "config.json")
    settings = read_object(path) if path.is_file() else {}
    kept = {name: value for name, value in settings.items() if name != "auto_map" or value not in NO_CODES}
    is_qwen2 = model_config.is_file() and read_object(model_config).get("model_type") == "qwen2"
    if is_qwen2 and settings.get("tokenizer_class") == GENERAL_CLASS and not _cuts_bytes(tokenizer):
        kept |= dict(auto_map=NO_CODE)
    if kept != settings:
        path.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _cuts_bytes(tokenizer):
    """Whether a tokenizer's pieces are bytes, as Qwen's are."""
    return '"ByteLevel"' in json.dumps(json.loads(tokenizer.backend.to_str())["pre_tokenizer"])


def count_merged_tokens(tokenizer: ChatTokenizer) -> int:
    """Number of tokens of more than one character."""
    added = {token.content for token in tokenizer.backend.get_added_tokens_decoder().values()}
    learnt = tokenizer.backend.get_vocab(with_added_tokens=False).keys() - added - {*BYTE_TOKENS}
    return sum(len(token) > 1 for token in learnt)


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


def _fingerprint(state: dict) -> str:
    # of the backend's serialization, not the file's text: older files write the same merges in another form
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
