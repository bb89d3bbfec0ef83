"""Chooses each slot's next token from its logits: penalties, temperature, filters, a draw that its seed determines.

Everything is a tensor operation of fixed shape, so that a step can be captured as a CUDA graph. Letters: S slots,
V vocabulary, W ids of a slot's history.
"""

from dataclasses import asdict, dataclass, fields

import torch
import torch.nn.functional as F

from model.formats.carried import GUARDS, ONLY_DRAWN, RECORD, record_of

MAX_NGRAM = 16
BLOCK_COLUMNS = 256  # of logits, whose maximum says whether the likeliest token is among them
# the least and the most that a setting may be, and the one of the two that it may not
LIMITS = dict(
    temperature=(0, 100), top_k=(0, 2**31 - 1), top_p=(0, 1), min_p=(0, 1), repetition_penalty=(0.01, 100),
    no_repeat_ngram_size=(0, MAX_NGRAM), seed=(0, 2**63 - 1),
)  # fmt: skip
EXCLUDED = dict(top_p=0, min_p=1)
GOLDEN_GAMMA, MIX_1, MIX_2 = 0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen, in the words of transformers' GenerationConfig. Greedy if `temperature` is 0.

    What is held against repetition counts generated tokens alone, so an answer may quote its question. transformers
    counts whatever its decoder has read.

    The same request with the same seed gets the same answer, whatever is answered beside it, but for rounding: another
    number of slots changes the last bits of logits, which can decide a draw that is nearly a tie.
    Raises ValueError for a number out of its range.
    """

    temperature: float = 0.0
    top_k: int = 0  # only the k most likely tokens; 0: all
    top_p: float = 1.0  # only the most likely tokens that together have this probability (Holtzman et al. 2020)
    min_p: float = 0.0  # only tokens at least this times as likely as the most likely one (Nguyen et al. 2024)
    repetition_penalty: float = 1.0  # divides positive logits of tokens already generated (Keskar et al. 2019)
    no_repeat_ngram_size: int = 0  # no run of so many tokens is generated twice; 0: any may be
    seed: int = 0

    def __post_init__(self):
        rules = dict(
            temperature="from 0, which is greedy, to 100", top_k="0, which is off, or above",
            top_p="above 0 and at most 1",
            min_p="from 0 to below 1", repetition_penalty="from 0.01 to 100; 1 is off",
            no_repeat_ngram_size=f"from 0, which is off, to {MAX_NGRAM}", seed="from 0 to 2**63 - 1",
        )  # fmt: skip
        for name, (least, most) in LIMITS.items():
            value = getattr(self, name)
            if not least <= value <= most or value == EXCLUDED.get(name):
                raise ValueError(f"{name}={value}: must be {rules[name]}")


GREEDY = Sampling()


def generation_config(sampling, max_new_tokens, reads_one_stream=False):
    """Values of a generation_config.json that stand for these settings.

    Of a network that `reads_one_stream` transformers holds the prompt, too, against an answer that repeats it. So what
    guards against repetition there stands in RECORD, which this trainer alone reads.
    """
    values = asdict(sampling) | dict(do_sample=bool(sampling.temperature), max_new_tokens=max_new_tokens)
    del values["seed"]
    values = {name: value for name, value in values.items() if values["do_sample"] or name not in ONLY_DRAWN}
    guards = {name: values[name] for name in GUARDS if values[name] != getattr(GREEDY, name)}
    if not reads_one_stream or not guards:
        return values
    return values | {name: getattr(GREEDY, name) for name in guards} | {RECORD: guards}


def sampling_from(values):
    """Sampling that the dict `values` of a generation_config.json asks for, with transformers' defaults.

    Raises ValueError for values that it cannot have.
    """
    values = values | {name: guard for name, guard in record_of(values).items() if name in GUARDS}
    given = {f.name: values[f.name] for f in fields(Sampling) if values.get(f.name) is not None}
    try:
        numbers = {f.name: f.type(given[f.name]) for f in fields(Sampling) if f.name in given}
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"the settings {given!r:.200} must be numbers") from None
    if values.get("do_sample"):
        return Sampling(**dict(temperature=1.0, top_k=50) | numbers)
    return Sampling(**{name: number for name, number in numbers.items() if name not in ONLY_DRAWN})


@dataclass(frozen=True)
class Mode:
    """Which work a step does for its slots together; one graph serves all slots of a mode."""

    is_drawn: bool = False  # some slot samples
    candidates: int = 0  # most likely tokens that some slot is filtered to; 0: no slot is filtered
    is_penalised: bool = False
    longest_ngram: int = 0


def mode_of(samplings, vocab_size):
    """The Mode that serves these Samplings."""
    drawn = [s for s in samplings if s.temperature]
    filtered = any(s.top_k or s.top_p < 1 or s.min_p for s in drawn)
    most = max((s.top_k or vocab_size for s in drawn), default=0) if filtered else 0
    return Mode(
        bool(drawn),
        min(2 ** (most - 1).bit_length(), vocab_size) if most else 0,  # powers of two: few modes
        any(s.repetition_penalty != 1 for s in samplings),
        max((s.no_repeat_ngram_size for s in samplings), default=0),
    )


class SlotSettings:
    """The Sampling of every slot, as tensors (S,)."""

    def __init__(self, slots, device):
        for field in fields(Sampling):
            dtype = torch.float32 if field.type is float else torch.int64
            setattr(self, field.name, torch.full((slots,), field.default, dtype=dtype, device=device))

    def put(self, slots, samplings):
        """Write these Samplings into these slots, an index tensor."""
        for field in fields(Sampling):
            tensor = getattr(self, field.name)
            tensor[slots] = torch.tensor([getattr(s, field.name) for s in samplings]).to(tensor)

    def first(self, slots):
        """The settings of the first `slots` slots, sharing their memory."""
        view = object.__new__(SlotSettings)
        vars(view).update({name: tensor[:slots] for name, tensor in vars(self).items()})
        return view


def choose(logits, history, count, settings, mode):
    """The next token of each slot, (S,), from `logits` (S, V).

    `history` (S, W) holds the id that each slot decodes from, then its `count` (S,) generated ids. Follows the order of
    transformers' generate: penalties, temperature, top-k, top-p, min-p.
    """
    if mode == Mode():
        return likeliest_of(logits)
    if mode.is_penalised or mode.is_drawn:
        logits = logits.float()
    if mode.is_penalised:
        logits = penalise(logits, history, count, settings.repetition_penalty)
    if mode.longest_ngram:
        banned = repeated_ngrams(history, count, settings.no_repeat_ngram_size, mode.longest_ngram)
        logits = logits.masked_fill(_mark(banned, history, logits), -torch.inf)
    likeliest = likeliest_of(logits)
    if not mode.is_drawn:
        return likeliest
    logits = logits / settings.temperature.clamp(min=1e-5)[:, None]
    drawn = draw(*filtered(logits, settings, mode.candidates), settings.seed, count)
    return torch.where(settings.temperature > 0, drawn, likeliest)


def likeliest_of(logits):
    """The column of the first maximum of each row of `logits` (S, vocabulary), (S,).

    On a CPU PyTorch's amax is several times as fast as its argmax: the block with the highest maximum is searched.
    """
    if logits.is_cuda:
        return logits.argmax(dim=1)
    step = min(BLOCK_COLUMNS, logits.shape[1])
    blocks = logits.unfold(1, step + logits.shape[1] % step, step)  # they overlap, so that the last one ends the row
    block = blocks.amax(dim=2).argmax(dim=1)
    return block * step + blocks[torch.arange(len(blocks)), block].argmax(dim=1)


def penalise(logits, history, count, penalty):
    """`logits`, those of generated tokens divided by `penalty` (S,) if positive, else multiplied by it."""
    columns = torch.arange(history.shape[1], device=history.device)
    is_generated = (columns > 0) & (columns <= count[:, None])
    penalised = torch.where(logits > 0, logits / penalty[:, None], logits * penalty[:, None])
    return torch.where(_mark(is_generated, history, logits), penalised, logits)


def repeated_ngrams(history, count, sizes, longest):
    """bool (S, W): columns whose token, if it came next, would repeat a run of `sizes` (S,) generated tokens."""
    columns = torch.arange(history.shape[1], device=history.device)
    repeats = (columns <= count[:, None]) & (sizes > 0)[:, None] & (columns >= sizes[:, None])
    if longest == 1:
        return repeats
    back = torch.arange(longest - 1, 0, -1, device=history.device)  # a run's tokens, counted from the one to come
    before = F.pad(history, (longest - 1, 0)).unfold(1, longest - 1, 1)[:, :-1]  # (S, W, longest - 1)
    last = history.gather(1, (count[:, None] + 1 - back).clamp(min=0))
    same = (before == last[:, None]) | (back >= sizes[:, None])[:, None]
    return repeats & same.all(dim=2)


def _mark(chosen, history, logits):
    """bool (S, V): the tokens at the `chosen` (S, W) columns of the history."""
    spare = logits.shape[1]  # a column that takes those not chosen, and is cut off
    marks = torch.zeros(len(logits), spare + 1, dtype=torch.bool, device=logits.device)
    return marks.scatter_(1, history.masked_fill(~chosen, spare), True)[:, :spare]


def filtered(logits, settings, candidates):
    """(probabilities (S, C), their tokens (S, C)); filtered tokens have probability 0."""
    if not candidates:
        return logits.softmax(dim=1), torch.arange(logits.shape[1], device=logits.device).expand_as(logits)
    logits, tokens = logits.topk(candidates, dim=1)  # sorted, the likeliest first
    ranks = torch.arange(candidates, device=logits.device)
    top_k = torch.where(settings.top_k > 0, settings.top_k, logits.shape[1])
    logits = logits.masked_fill(ranks >= top_k[:, None], -torch.inf)
    probabilities = logits.softmax(dim=1)
    before = probabilities.cumsum(dim=1) - probabilities
    kept = (before < settings.top_p[:, None]) & (probabilities >= settings.min_p[:, None] * probabilities[:, :1])
    kept[:, 0] = True
    return probabilities * kept, tokens


def draw(probabilities, tokens, seed, count):
    """One of `tokens` (S, C) for each slot, drawn with their `probabilities` (S, C), which need not add up to 1.

    Each token waits for a time drawn from an exponential distribution with its probability as the rate, and the first
    one wins. So the draw depends neither on the order of the tokens nor on those that are filtered.
    """
    numbers = uniform(seed[:, None], count[:, None], tokens)
    winner = (probabilities / -numbers.log()).argmax(dim=1, keepdim=True)
    return tokens.gather(1, winner)[:, 0]


def uniform(seed, count, tokens):
    """float32 numbers in [0, 1), of the shape of `tokens`, that seed, count and token determine."""
    return _shift_right(_mix(_mix(seed, count), tokens), 40).to(torch.float32) * 2.0**-24


def _mix(state, step):
    """Output number `step` of SplitMix64 (Steele, Lea and Flood 2014), started at `state`."""
    z = state + (step + 1) * GOLDEN_GAMMA
    z = (z ^ _shift_right(z, 30)) * MIX_1
    z = (z ^ _shift_right(z, 27)) * MIX_2
    return z ^ _shift_right(z, 31)


def _shift_right(z, bits):
    return (z >> bits) & (2 ** (64 - bits) - 1)  # int64 keeps its sign in a shift
