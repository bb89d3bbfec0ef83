"""A trained model as lm-evaluation-harness sees one: likelihoods of given texts, and texts generated up to a stop.

Its model `local-completions` cannot evaluate a T5, whose prompt and answer lie in two sequences.
"""

from dataclasses import fields

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from model.generate.engine import Engine, Request
from model.generate.sampling import Sampling, sampling_from
from model.generate.scoring import TOKENS_AT_ONCE, ScoreRequest, score_all
from model.nn.registry import family_of
from model.serve.answering import TextStream, load_chat_model
from model.serve.openai_api import StopFilter

MAX_LENGTH = 2048  # tokens of a sequence of a network without a limit of its own
DEFAULT_NEW_TOKENS = 256  # as lm-evaluation-harness has it
SETTINGS = {field.name for field in fields(Sampling)} | {"do_sample"}


@register_model("chat_trainer")
class ChatTrainerLM(TemplateLM):
    """The model in the directory `pretrained`, a T5 or a decoder.

    Texts are encoded as transformers encodes them, a T5's prompt with its EOS, and with the prefix that it was trained
    with. Texts of more than `max_length` tokens lose their beginning. `dtype` is auto (bf16 where the GPU has it),
    bfloat16 or float32; `batch_size` is for the answers that are generated together.
    """

    def __init__(self, pretrained, max_length=None, dtype="auto", batch_size=64, device=None, max_batch_size=None):
        super().__init__()
        precisions = dict(auto="auto", bfloat16="bf16", float32="no")
        if dtype not in precisions:
            raise ValueError(f"dtype={dtype!r:.80}: must be one of {', '.join(precisions)}")
        device = device if torch.cuda.is_available() else "cpu"  # lm_eval gives cuda wherever it runs
        self.chat = load_chat_model(pretrained, device, precisions[dtype])
        self._reads_on = family_of(self.chat.model.config).reads_one_stream
        self.backend = "causal" if self._reads_on else "seq2seq"
        self.max_length = int(max_length or self.chat.model.config.max_tokens or MAX_LENGTH)
        self.slots = 64 if batch_size == "auto" else int(batch_size)
        self._device = self.chat.model.device

    @property
    def eot_token_id(self):
        return self.chat.tokenizer.eos_id

    @property
    def tokenizer_name(self):
        return self.chat.tokenizer.fingerprint

    def tok_encode(self, string, add_special_tokens=None, **kwargs):
        """Ids of a text; those of a T5's prompt, which are asked for without `add_special_tokens`, end with EOS."""
        if self._reads_on or add_special_tokens is False:
            return self.chat.tokenizer.parse(string)
        return [*self.chat.tokenizer.parse(self.chat.prefix + string), self.eot_token_id]

    def _loglikelihood_tokens(self, requests, **kwargs):
        """(log-likelihood, whether greedy decoding gives it) of each (texts, context ids, continuation ids)."""
        asked = [self._score_request(context, continuation) for _, context, continuation in requests]
        limits = self.chat.limits(1, 1, 1)
        scores = score_all(self.chat.model, limits.first_id, asked, TOKENS_AT_ONCE[self.device.type])
        answers = [(float(each.log_probs.sum(dtype="float64")), each.is_greedy) for each in scores]
        for (texts, _, _), answer in zip(requests, answers, strict=True):
            if texts is not None:  # a part of a longer text
                self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def _score_request(self, context, continuation):
        room = self.max_length + 1 - len(continuation) if self._reads_on else self.max_length
        if room < 1:
            raise ValueError(
                f"a continuation has {len(continuation)} tokens, and a sequence at most {self.max_length}: "
                "give a larger max_length in --model_args"
            )
        return ScoreRequest(context[-room:], continuation)

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        """The log-likelihood of each whole text, after EOS; in windows of `max_length` tokens if it is longer."""
        if not self._reads_on:
            raise ValueError(
                "this task asks how likely a whole text is (loglikelihood_rolling), and a T5 only says how likely an "
                "answer to a prompt is: choose a task with choices or generated answers"
            )
        return [self._of_text(*request.args) for request in requests]

    def _of_text(self, text):
        windows = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length, 1)
        parts = [(None, *make_disjoint_window(window)) for window in windows]
        total = sum(value for value, _ in self._loglikelihood_tokens(parts))
        self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return total

    def generate_until(self, requests, disable_tqdm=False):
        """The text that each context is followed by, up to the first of its stops."""
        groups, texts = {}, [""] * len(requests)
        for place, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(place)
        for places in groups.values():
            settings = requests[places[0]].args[1]
            contexts = [requests[place].args[0] for place in places]
            for place, text in zip(places, self._generate(contexts, settings), strict=True):
                texts[place] = text
                self.cache_hook.add_partial("generate_until", requests[place].args, text)
        return texts

    def _generate(self, contexts, settings):
        """The text that each of `contexts` is followed by."""
        given = dict(normalize_gen_kwargs(settings, DEFAULT_NEW_TOKENS))
        stops = handle_stop_sequences(given.pop("until"), None)
        new_tokens = given.pop("max_gen_toks")
        if unknown := given.keys() - SETTINGS:
            raise ValueError(
                f"{min(unknown)} of the task's generation_kwargs is not supported: only {', '.join(sorted(SETTINGS))}"
            )
        room = self.max_length - (new_tokens if self._reads_on else 0)
        inputs = [self.tok_encode(context)[-room:] or [self.prefix_token_id] for context in contexts]
        limits = self.chat.limits(min(self.slots, len(inputs)), max(map(len, inputs)), new_tokens)
        engine, answers = Engine(self.chat.model, limits), []
        for ids in inputs:
            engine.add(Request(ids, new_tokens, sampling_from(given), streams=True))
            answers.append(_Answer(self.chat.tokenizer, stops))
        while not engine.idle:
            for progress in engine.step():
                answers[progress.number].add(progress)
                if answers[progress.number].stop.is_stopped:
                    engine.cancel(progress.number)
        return [answer.text for answer in answers]


class _Answer:
    """One text as its tokens come."""

    def __init__(self, tokenizer, stops):
        self.text, self.stop = "", StopFilter([stop for stop in stops if stop])
        self._stream = TextStream(tokenizer)

    def add(self, progress):
        if not self.stop.is_stopped:
            self.text += self.stop.add(self._stream.add(progress.ids, progress.is_finished), progress.is_finished)
