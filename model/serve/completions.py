"""Prompts of /v1/completions continued as they stand, and the log-probabilities of their tokens."""

import asyncio
from bisect import bisect_left
from dataclasses import dataclass
from functools import cache

from model.data.answer_parts import join_parts
from model.generate.engine import Request
from model.generate.scoring import ScoreRequest, TokenScores
from model.nn.registry import family_of
from model.serve.answer_stream import AnswerStream, as_text, collect
from model.serve.answering import MAX_TOKEN_CHARACTERS, TextStream, prompt_ids
from model.serve.openai_api import StopFilter, usage_of
from model.serve.openai_completions import logprobs_of

MAX_NAMED = 2**19  # log-probabilities in one answer, each of which takes some 250 bytes of memory


@dataclass(frozen=True)
class Continued:
    """What follows a prompt."""

    text: str
    reason: str  # why it ended
    num_tokens: int  # generated, without EOS
    ids: list  # generated, the EOS that ended it among them
    scores: TokenScores | None  # of these, and with echo of the prompt's but the first; None: not asked for


def ids_of_prompt(service, prompt):
    """Ids that the network reads of a prompt, a text or a tuple of ids; ValueError if they are too many.

    A decoder goes on with the text, in which control tokens may be spelt; a T5 answers the text as a question.
    """
    chat, most = service.chat, service.input_tokens
    if isinstance(prompt, str) and not family_of(chat.model.config).reads_one_stream:
        return list(prompt_ids(chat, [("user", prompt)], most))
    is_long = isinstance(prompt, str) and len(prompt) > MAX_TOKEN_CHARACTERS * most
    ids = chat.tokenizer.parse(prompt) if isinstance(prompt, str) and not is_long else list(prompt)
    if len(ids) > most:
        raise ValueError(
            f"the prompt has {len(ids):,} {'characters' if is_long else 'tokens'}, and at most {most} tokens are read: "
            "shorten it, or start the server with --max_prompt_tokens=N"
        )
    return ids


def check_size(request, prompts):
    """Raise ValueError if a CompletionRequest whose prompts have the ids `prompts` asks for too many numbers."""
    if request.logprobs is None:
        return
    tokens = len(prompts) * request.asked.max_new_tokens + request.echo * sum(map(len, prompts))
    if tokens * max(request.logprobs, 1) > MAX_NAMED:
        raise ValueError(
            f"logprobs={request.logprobs} of up to {tokens:,} tokens in {len(prompts)} prompts: an answer has at most "
            f"{MAX_NAMED:,} log-probabilities: send fewer prompts at a time, or lower logprobs or max_tokens"
        )


async def continue_all(service, request, prompts, deadline):
    """(choices, usage) of a CompletionRequest whose prompts have the ids `prompts`, by a `deadline` of the event loop.

    Raises TooBusy if too many requests wait, and RuntimeError.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_continued(service, request, ids, deadline)) for ids in prompts]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    done = [task.result() for task in tasks]
    choices = await asyncio.to_thread(_choices, service.chat.tokenizer, request, prompts, done)
    return choices, usage_of(sum(map(len, prompts)), sum(each.num_tokens for each in done))


async def _continued(service, request, ids, deadline):
    """The Continued of a prompt.

    The likeliest token after a prompt is known with its log-probabilities, so that one greedy token, which
    lm-evaluation-harness asks for, takes no pass but theirs.
    """
    asked = request.asked
    is_greedy_one = asked.max_new_tokens == 1 and not asked.sampling.temperature and request.logprobs is not None
    if is_greedy_one or not asked.max_new_tokens:
        return await _likeliest(service, request, ids, deadline)
    stream = service.decoder.submit(Request(ids, asked.max_new_tokens, asked.sampling, streams=True))
    answer = AnswerStream(service, stream, asked, as_text, len(ids), deadline)
    text = join_parts(await collect(answer)).text
    tokenizer, new_ids, scores = service.chat.tokenizer, [], None
    if request.logprobs is not None:
        is_stopped = answer.reason == "stop" and not answer.has_ended_itself
        new_ids = _ids_of_text(tokenizer, answer.ids, text) if is_stopped else answer.ids
        new_ids = [*new_ids, tokenizer.eos_id] if answer.has_ended_itself else new_ids
        scores = await _scores(service, request, ids, new_ids, deadline)
    return Continued(text, answer.reason, answer.new_tokens, new_ids, scores)


async def _likeliest(service, request, ids, deadline):
    """The Continued of a prompt by its likeliest next token, or by none."""
    new = ids[:1] * request.asked.max_new_tokens  # stands for the token that is not known yet
    scores = await _scores(service, request, ids, new, deadline)
    if not new:
        return Continued("", "length", 0, [], scores)
    service.metrics.new_tokens.inc()
    token_id, tokenizer = int(scores.top_ids[-1, 0]), service.chat.tokenizer
    scores.log_probs[-1] = scores.top_log_probs[-1, 0]
    stop, is_end = StopFilter(request.asked.stops), token_id == tokenizer.eos_id
    text = "" if is_end else stop.add(TextStream(tokenizer).add([token_id], is_last=True), True)
    return Continued(text, "stop" if is_end or stop.is_stopped else "length", int(not is_end), [token_id], scores)


async def _scores(service, request, ids, new_ids, deadline):
    """TokenScores of what a CompletionRequest asks about, of a prompt and what follows it; None if that is nothing."""
    context, targets = (ids[:1], ids[1:] + new_ids) if request.echo else (ids, new_ids)
    if request.logprobs is None or not targets:
        return None
    stream = service.decoder.submit(ScoreRequest(context, targets, max(request.logprobs, 1)))
    try:
        async with asyncio.timeout_at(deadline):
            return await stream.scores()
    except TimeoutError:
        raise RuntimeError(f"the log-probabilities were not there within {service.request_seconds:g} s") from None
    finally:
        service.decoder.cancel(stream)


def _ids_of_text(tokenizer, ids, text):
    """The first of `ids` that together give `text`, where a stop ended it; few are decoded, however many there are."""
    return ids[: bisect_left(range(len(ids)), True, key=lambda n: tokenizer.decode(ids[:n]).startswith(text))]


def _choices(tokenizer, request, prompts, done):
    """The choices of a whole answer."""
    token_text = cache(lambda token_id: tokenizer.backend.decode([token_id], skip_special_tokens=False))
    each = enumerate(zip(request.prompts, prompts, done, strict=True))
    return [_choice(tokenizer, token_text, request, index, one) for index, one in each]


def _choice(tokenizer, token_text, request, index, one):
    prompt, prompt_ids, continued = one
    ids, echoed, rows = continued.ids, "", []
    if request.echo:
        ids, rows = prompt_ids + ids, [None]
        echoed = prompt if isinstance(prompt, str) else tokenizer.backend.decode(prompt_ids, skip_special_tokens=False)
    logprobs = None
    if request.logprobs is not None:
        logprobs = logprobs_of(token_text, ids, rows + _rows(continued.scores, request.logprobs))
    return dict(text=echoed + continued.text, index=index, logprobs=logprobs, finish_reason=continued.reason)


def _rows(scores, count):
    """(log-probability, [(id, log-probability) of the `count` likeliest]) of each token; [] if nothing was scored."""
    if scores is None:
        return []
    values, ids = scores.top_log_probs.tolist(), scores.top_ids.tolist()
    tops = [list(zip(i, v, strict=True))[:count] for i, v in zip(ids, values, strict=True)]
    return list(zip(scores.log_probs.tolist(), tops, strict=True))
