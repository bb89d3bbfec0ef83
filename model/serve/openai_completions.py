"""The requests and answers of /v1/completions: several prompts, as text or token ids, with log-probabilities."""

import re
from dataclasses import dataclass

from model.nn.registry import family_of
from model.serve.openai_api import ApiRequest, flag_of, given_fields, request_of

MAX_PROMPTS, MAX_LOGPROBS = 128, 20
OWN = {"echo", "logprobs"}
HALF_CHARACTER = re.compile("[\ud800-\udfff]")  # a surrogate, which JSON can spell and no tokenizer reads


@dataclass(frozen=True)
class CompletionRequest:
    """What a client asks to have continued."""

    asked: ApiRequest
    prompts: tuple  # each a text, or a tuple of token ids
    echo: bool = False  # the text, and what is said of its tokens, begins with the prompt
    logprobs: int | None = None  # ids named at each place beside the one there; None: no log-probabilities


def parse_completion(body, chat, most_new_tokens):
    """CompletionRequest of the JSON body of /v1/completions; ValueError with the reason if it cannot be served."""
    prompts = _prompts(body.get("prompt"), chat.model.config.vocab_size)
    given = given_fields(body, "prompt", OWN)
    echo, logprobs = flag_of("echo", given), _logprobs(given)
    reads_on = family_of(chat.model.config).reads_one_stream
    if echo and not reads_on:
        raise ValueError(
            "echo=true: this model reads a prompt apart from its answer, so a prompt has no log-probabilities: leave "
            "it out (lm-evaluation-harness evaluates such a model with scripts/lm_eval_model.py)"
        )
    asked = request_of((), given, chat, most_new_tokens, least=0 if echo else 1)
    if asked.streams and (len(prompts) > 1 or echo or logprobs is not None):
        raise ValueError("stream=true goes with one prompt, without echo and logprobs: leave it out")
    return CompletionRequest(asked, prompts, echo, logprobs)


def _prompts(prompt, vocab_size):
    """The prompts, each a text or a tuple of ids, of one of the four forms that OpenAI's interface has for them."""
    if isinstance(prompt, str) or _is_ids(prompt):
        prompt = [prompt]
    if not isinstance(prompt, list) or not 0 < len(prompt) <= MAX_PROMPTS:
        raise ValueError(f"prompt must be a text, a list of token ids, or a list of 1 to {MAX_PROMPTS} such")
    for one in prompt:
        if not one or not (isinstance(one, str) or _is_ids(one)):
            raise ValueError("prompt must be text that is not empty, or a list of token ids")
        if isinstance(one, str) and (half := HALF_CHARACTER.search(one)):
            raise ValueError(f"prompt has {half[0]!r}, half of a character, at place {half.start()}: leave it out")
        if not isinstance(one, str) and not 0 <= min(one) <= max(one) < vocab_size:
            raise ValueError(
                f"prompt has the token ids {min(one)} to {max(one)}: this model's are 0 to {vocab_size - 1}"
            )
    return tuple(one if isinstance(one, str) else tuple(one) for one in prompt)


def _is_ids(prompt):
    return isinstance(prompt, list) and bool(prompt) and all(type(token_id) is int for token_id in prompt)


def _logprobs(given):
    count = given.get("logprobs")
    if count is None or count is False:
        return None
    if type(count) is not int or not 0 <= count <= MAX_LOGPROBS:
        raise ValueError(f"logprobs={count!r:.80}: must be a whole number from 0 to {MAX_LOGPROBS}")
    return count


def logprobs_of(token_text, ids, scores, start=0):
    """What the interface says of the tokens `ids`: text, log-probability, likeliest ones, place of each in the text.

    `scores` has (log-probability, [(id, log-probability) of the likeliest]) for each, None for one that nothing stands
    before. `token_text` gives the text of an id; ids of equal text are one in `top_logprobs`, with the likeliest's.
    """
    tokens, tops, offsets = [token_text(token_id) for token_id in ids], [], []
    for token, score in zip(tokens, scores, strict=True):
        offsets.append(start)
        start += len(token)
        tops.append(score and _top(token_text, score[1], token, score[0]))
    values = [score and score[0] for score in scores]
    return dict(tokens=tokens, token_logprobs=values, top_logprobs=tops, text_offset=offsets)


def _top(token_text, likeliest, token, log_prob):
    named = {}
    for token_id, value in likeliest:
        named.setdefault(token_text(token_id), value)
    named.setdefault(token, log_prob)
    return named
