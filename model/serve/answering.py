"""A trained model as people talk to it: loaded from its directory, turns in, thought, text and calls out, in pieces."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch

from model.commands.machine import compute_dtype, has_native_bf16
from model.data.answer_parts import AnswerParts
from model.data.cleaning import clean_text
from model.data.conversation import TOOL, Turn, system_first
from model.data.t5_text import encode_conversation
from model.data.tokenizer import ChatTokenizer, load_tokenizer
from model.data.turn_template import turn_template, with_turn_end
from model.formats.adapters import load_merged, weights_directory
from model.formats.carried import record_of
from model.formats.weights import check_fits, load_into
from model.generate.engine import Engine, Limits, Request
from model.generate.sampling import Sampling, sampling_from
from model.nn.base import LanguageModel
from model.nn.registry import family_of
from model.runtime.json_stream import read_object

DEFAULT_NEW_TOKENS, MAX_NEW_TOKENS = 256, 2**20
MAX_PREFIX_CHARACTERS = 2**14
MAX_TOKEN_CHARACTERS = 16  # a longer question than so many characters a token is refused unread
SHORT_CHARACTERS = 2000  # of a prompt, which are tokenised in a millisecond
TURN_CHARACTERS = 8  # that are read in the time that a turn takes beside its text


@dataclass(frozen=True)
class ChatModel:
    """A model, its tokenizer, and how its generation_config.json says to answer."""

    directory: Path
    model: LanguageModel
    tokenizer: ChatTokenizer
    sampling: Sampling
    max_new_tokens: int
    prefix: str = ""  # before each question, as in training
    single_turn: bool = False  # it was trained on single questions, and knows no conversation

    def encode(self, turns, max_tokens, tools="", thinking=None):
        """Ids that the network reads to answer the last of `turns`, at most `max_tokens`.

        `tools` is the JSON text of those that may be called; `thinking` asks for a thought or against one.
        """
        if family_of(self.model.config).reads_dialogues:
            return turn_template(self.tokenizer).encode_question(turns, max_tokens, tools, thinking)
        return encode_conversation(turns, self.tokenizer, max_tokens, self.prefix, tools, bool(thinking))

    def opens_thought(self, thinking=None):
        """Whether a prompt ends inside the thought, so that the answer begins there."""
        reads_dialogues = family_of(self.model.config).reads_dialogues
        return reads_dialogues and turn_template(self.tokenizer).opens_thought(thinking)

    def reads_at_once(self, turns, tools="", thinking=None):
        """Whether `prompt_ids` of these Turns takes a millisecond at most: they are short, no template is rendered."""
        if not self.is_short(turns, tools) or not family_of(self.model.config).reads_dialogues:
            return self.is_short(turns, tools)
        said = list(filter(_says_something, _newest_cleaned(turns, SHORT_CHARACTERS, SHORT_CHARACTERS)))
        asked, template = (said[question_start(said) :], said), turn_template(self.tokenizer)
        return all(template.knows_question(some, tools, thinking) for some in asked)

    def is_short(self, turns, tools=""):
        """Whether these Turns are tokenised in a millisecond."""
        chars = len(tools) + sum(TURN_CHARACTERS + len(self.prefix) + _num_chars(turn) for turn in turns)
        return chars <= SHORT_CHARACTERS

    def prompt_tokens(self, most, new_tokens):
        """Most tokens of a prompt with an answer of `new_tokens`: `most`, or fewer where the network has fewer places.

        Raises ValueError if there is no place for a prompt.
        """
        places = self.model.config.max_tokens
        if places is None:
            return most
        if places <= new_tokens:
            raise ValueError(f"max_new_tokens={new_tokens}: this model has {places} places, the prompt's too: lower it")
        return min(most, places - new_tokens)

    def limits(self, slots, input_tokens, new_tokens):
        """Limits of an Engine for this model; ValueError for more tokens than the network has places for."""
        if (most := self.prompt_tokens(input_tokens, new_tokens)) < input_tokens:
            raise ValueError(
                f"this model reads {most} tokens before an answer of max_new_tokens={new_tokens}, and a prompt may "
                f"have {input_tokens}: lower --max_prompt_tokens or --max_new_tokens"
            )
        first_id = family_of(self.model.config).first_id(self.model.config, self.tokenizer)
        return Limits(slots, input_tokens, new_tokens, first_id, self.tokenizer.eos_id)


def load_chat_model(path, device=None, mixed_precision="auto"):
    """ChatModel of a Hugging Face directory, of an adapter's, or of a run directory (its best/, else its last/).

    It is on the GPU if there is one. An adapter is merged into its base.

    Raises ValueError if there is none, and for damaged or misfit files. The weights are held once, in the dtype that
    they are computed with, as the option `mixed_precision` has it.
    """
    directory = weights_directory(path)
    if directory is None:
        raise ValueError(
            f"no model in {path}: name a Hugging Face directory (config.json and model.safetensors), an adapter's "
            "directory, or a run directory with best/ or last/, for example model_save/sft_fast"
        )
    weights = load_merged(directory)
    tokenizer = load_tokenizer(weights.tokenizer_dir)
    if weights.model_config.vocab_size < tokenizer.vocab_size:
        raise ValueError(
            f"{directory}: the model has {weights.model_config.vocab_size} tokens and the tokenizer beside it "
            f"{tokenizer.vocab_size}: copy the tokenizer files that the model was trained with"
        )
    if family_of(weights.model_config).reads_dialogues:
        tokenizer = with_turn_end(tokenizer)
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    settings = directory / "generation_config.json"
    values = read_object(settings) if settings.is_file() else {}
    new_tokens = values.get("max_new_tokens") or DEFAULT_NEW_TOKENS
    if type(new_tokens) is not int or not 0 < new_tokens <= MAX_NEW_TOKENS:
        raise ValueError(f"{settings} says max_new_tokens={new_tokens!r:.80}: it must be from 1 to {MAX_NEW_TOKENS}")
    prefix = values.get("prefix") or ""
    if not isinstance(prefix, str) or len(prefix) > MAX_PREFIX_CHARACTERS:
        raise ValueError(f"{settings} says prefix={prefix!r:.80}: it must be a text of {MAX_PREFIX_CHARACTERS} at most")
    single_turn = record_of(values).get("single_turn") is True
    dtype = compute_dtype(mixed_precision, has_native_bf16(device))
    model = _frozen(weights, directory, device, dtype)
    return ChatModel(directory, model, tokenizer, sampling_from(values), new_tokens, prefix, single_turn)


def _frozen(weights, directory, device, dtype):
    """The model with these LoadedWeights, for generation alone."""
    family = family_of(weights.model_config)
    with torch.device("meta"):
        model = family.build(weights.model_config, 0.0, dtype).requires_grad_(False)
    check_fits(model, weights, directory)  # before memory is taken for a model that does not fit
    load_into(model.place(device), weights, directory)
    return model.eval()


def prompt_ids(chat, turns, most_tokens, tools="", thinking=None):
    """Ids of the prompt that these turns, each a Turn or (role, text), make: at most `most_tokens`, EOS included.

    The oldest turns go where there is no room for all (model/data/conversation.py). Raises ValueError if the last turn
    is neither the user's nor a tool's, and for a question (from the user's last turn on) that is empty or does not fit.
    """
    most_chars = MAX_TOKEN_CHARACTERS * most_tokens
    turns = [Turn(*turn) for turn in turns]
    said = _newest_cleaned(turns, most_tokens, most_chars)
    if said[-1].role != TOOL and not said[-1].text:
        raise ValueError("the question is empty: write some text")
    said = list(filter(_says_something, said))
    if not family_of(chat.model.config).reads_dialogues:
        said = system_first(said)
    start = question_start(said)
    question_chars = max(len(turns[-1].text), sum(map(_num_chars, said[start:])))
    for what, chars in (("question", question_chars), ("list of tools", len(tools))):
        if chars > most_chars:
            raise ValueError(
                f"the {what} has {chars:,} characters, and a prompt at most {most_tokens} tokens: shorten it"
            )
    said = [turn._replace(text=turn.text[-most_chars:], thought=turn.thought[-most_chars:]) for turn in said]
    question = chat.encode(said[start:], most_tokens + 1, thinking=thinking)
    if len(question) > most_tokens:
        raise ValueError(f"the question has more than {most_tokens - 1} tokens: shorten it")
    ids = chat.encode(said, most_tokens, tools, thinking) if start or tools else question
    if len(ids) > most_tokens:
        what = "system text, tools" if tools else "system text"
        raise ValueError(f"{what} and question have more than {most_tokens - 1} tokens: shorten them")
    return ids


def question_start(turns):
    """The place of the user's last turn, from which on the results of calls belong to the question."""
    return max((place for place, turn in enumerate(turns) if turn.role == "user"), default=len(turns) - 1)


def _says_something(turn):
    return bool(turn.text or turn.thought or turn.calls) or turn.role == TOOL


def _num_chars(turn):
    return len(turn.text) + len(turn.thought) + sum(map(len, turn.calls))


def _newest_cleaned(turns, most_tokens, most_chars):
    """The turns cleaned, oldest first, without those that a prompt of `most_tokens` has no room for; a whole question.

    One that says a lot in a thousand turns is answered as fast as one that says it in three.
    """
    kept, chars, role, num_runs = [], Counter(), "", 0
    for turn in reversed(turns):
        # turns of one place become one text
        place = 0 if turn.role == "system" else num_runs + (turn.role != role)
        if place > most_tokens or (place != 1 and chars[place] > most_chars):
            continue
        text, thought = (clean_text(part[-most_chars:]) if part else "" for part in (turn.text, turn.thought))
        turn = turn._replace(text=text, thought=thought)
        chars[place] += _num_chars(turn)
        kept.append(turn)
        if place and _says_something(turn):
            role, num_runs = turn.role, place
    return kept[::-1]


def stream_answer(chat, input_ids, sampling, max_new_tokens, thinking=None):
    """Yield what is new of one answer (Said) as its tokens are generated."""
    engine = Engine(chat.model, chat.limits(1, len(input_ids), max_new_tokens))
    engine.add(Request(input_ids, max_new_tokens, sampling, streams=True))
    text, parts = TextStream(chat.tokenizer), AnswerParts(chat.opens_thought(thinking), reads_calls=True)
    while not engine.idle:
        for progress in engine.step():
            yield parts.add(text.add(progress.ids, progress.is_finished), progress.is_finished)


def answer_all(chat, inputs, sampling, max_new_tokens, slots=64):
    """The text of the answer to each of `inputs`, lists of ids."""
    engine = Engine(chat.model, chat.limits(min(slots, len(inputs)), max(map(len, inputs)), max_new_tokens))
    numbers = {engine.add(Request(ids, max_new_tokens, sampling)): place for place, ids in enumerate(inputs)}
    texts = [""] * len(inputs)
    while not engine.idle:
        for progress in engine.step():
            texts[numbers[progress.number]] = chat.tokenizer.decode(progress.ids)
    return texts


@dataclass
class TextStream:
    """Turns ids that come in pieces into text that comes in pieces, each of whole characters.

    The text does not depend on how the ids are divided. As in Hugging Face's text-generation-inference
    (`decode_token`), a token is decoded beside the one before it, because decoders treat the first token apart.
    """

    tokenizer: ChatTokenizer
    ids: list = field(default_factory=list)
    shown: int = 0  # ids whose text was given
    before: int = 0  # the id from which on they are decoded with the next ones

    def add(self, ids, is_last=False):
        """The text that can be shown after these ids, beyond what was given before; of the last ones all characters."""
        text = self.tokenizer.decode(self.ids[self.before :] + ids)
        is_whole = not text.endswith("\ufffd")  # else a part of a character may be its end
        if not is_whole and len(ids) > 1:
            return "".join(self.add([one]) for one in ids[:-1]) + self.add(ids[-1:], is_last)
        given = self.tokenizer.decode(self.ids[self.before : self.shown])
        self.ids += ids
        if is_last and not is_whole:  # tokens may end amid characters, one after the other
            return text[len(given) :].rstrip("\ufffd")
        if not is_whole or len(text) <= len(given):  # the latter with special tokens alone
            return ""
        self.before, self.shown = self.shown, len(self.ids)
        return text[len(given) :]
