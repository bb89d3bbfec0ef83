"""Which tokens of a tokenizer steer a network, and an encoder that no text can make give one of them.

A control token begins and ends turns and answers, opens a thought or a tool call, pads, or stands for what is unknown
or left out. Only a template writes it. The control tokens of a tokenizer are
- every added token that is marked special, which the eos and pad tokens always are;
- every other added token that reads as a mark: it holds a letter or a digit, and begins with neither, white space aside
  (<think>, </tool_call>, [INST], /nothink). Words (天气, C++) and runs of white space or signs that somebody added
  are text;
- the token for what is unknown, and in a Unigram vocabulary, whose pieces match what a text spells, those of
  SentencePiece's own names: <s>, </s>, <pad>, <extra_id_0> and the like. The tokens of single bytes stay reachable
  for the characters that need them, not for a text that spells <0x41>.

Everything follows from tokenizer.json and the names of eos and pad, as the fingerprint does.
"""

import json
import re
import secrets

from tokenizers import Tokenizer

PIECE = re.compile(r"▁?(<(/?s|pad|unk|bos|eos|cls|sep|mask|extra_id_\d+)>|\[(PAD|UNK|BOS|EOS|CLS|SEP|MASK)\])")
# Between the first character of a byte token's name and the others: no piece reaches over the end of a part.
BYTE_NAME = r"(?<=<)(?=0x[0-9A-F]{2}>)"


def is_control(text: str, special: bool) -> bool:
    """Whether the added token of this text is a control token (see above)."""
    shown = text.strip()
    return special or any(map(str.isalnum, shown)) and not shown[0].isalnum()


def control_ids(backend: Tokenizer) -> set[int]:
    """Ids of the added tokens that are control tokens."""
    added = backend.get_added_tokens_decoder().items()
    return {number for number, token in added if is_control(token.content, token.special)}


def control_texts(backend: Tokenizer) -> set[str]:
    """The texts that this tokenizer gives control tokens for."""
    added = backend.get_added_tokens_decoder().values()
    pieces = _control_pieces(json.loads(backend.to_str())["model"])
    return pieces | {token.content for token in added if is_control(token.content, token.special)}


def text_encoder(state: dict) -> Tokenizer:
    """A tokenizer that gives texts the ids of the one of this `state` (its tokenizer.json), and never a control token.

    A text that spells one is encoded whole with the other pieces of the vocabulary, behind the normaliser and the
    pre-tokenizer: `</s>` as `▁`, `<`, `/`, `s`, `>`, say, and so ＜/s＞ where a normaliser makes it that. Each control
    token has a random name here, which no text spells, and keeps its id. Changes `state`.
    """
    model, added = state["model"], state["added_tokens"]
    controls = {token["content"] for token in added if is_control(token["content"], token["special"])}
    controls |= _control_pieces(model)
    renamed = {name: secrets.token_hex(16) for name in controls}
    for token in added:
        if token["content"] in renamed:
            token |= dict(content=renamed[token["content"]], normalized=False)
    vocab = model["vocab"]
    if isinstance(vocab, list):
        model["vocab"] = [[renamed.get(piece, piece), score] for piece, score in vocab]
    else:
        model["vocab"] = {renamed.get(piece, piece): number for piece, number in vocab.items()}
    if model.get("unk_token"):
        model["unk_token"] = renamed[model["unk_token"]]
    if "merges" in model:
        model["merges"] = _merges_without(controls, model)
    if model["type"] == "Unigram" and model.get("byte_fallback"):
        split = dict(type="Split", pattern=dict(Regex=BYTE_NAME), behavior="Isolated", invert=False)
        steps = [step for step in (state["pre_tokenizer"], split) if step]
        state["pre_tokenizer"] = dict(type="Sequence", pretokenizers=steps)
    return Tokenizer.from_str(json.dumps(state))


def _control_pieces(model):
    """The control tokens among the vocabulary's own pieces."""
    unknown = {model["unk_token"]} if model.get("unk_token") else set()
    if model["type"] != "Unigram":
        return unknown
    unknown = {model["vocab"][model["unk_id"]][0]} if model.get("unk_id") is not None else unknown
    return unknown | {piece for piece, _ in model["vocab"] if PIECE.fullmatch(piece)}


def _merges_without(controls, model):
    """The merges of a BPE model that neither take nor give a control token."""
    inside = len(model.get("continuing_subword_prefix") or "")
    pairs = (pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"])
    return [[left, right] for left, right in pairs if controls.isdisjoint((left, right, left + right[inside:]))]
