"""How a step is cut so that it fits the memory: the fastest way that fits, and whether steps are recorded."""

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise, product

import numpy as np

from model.data.buckets import buckets_for
from model.memory.estimate import ANSWERS_A_BATCH

USABLE = 0.95  # of the memory there is, by prediction alone: it errs by 2 percent, forwards of many sizes leave holes
PROBED_USABLE = 0.98  # after a probe
CHUNKS = (2048, 1024, 512, 256, 128)  # target tokens whose logits exist at a time
CHUNKS_A_STEP = 8  # at least, down to 512 target tokens
CPU_MICRO_BATCH_TOKENS = 8192  # larger ones are not faster on a CPU
LARGEST_MICRO_BATCH_TOKENS = 262_144  # beyond this a GPU gains nothing
STEPS_THAT_REPAY_RECORDING = 100  # eight recordings take about a second, and save up to 10 ms a step
CHUNK_LAUNCHES = 0.006  # of a chunk, over those of a forward and backward
CHECKPOINTING = {"auto": (False, True), "True": (True,), "False": (False,)}  # what may be chosen
CHECKPOINTING_WORK, CHECKPOINTING_LAUNCHES = 1.3, 2.2  # what computing again takes, over a step without
RECORDED_LAUNCHES = 0.1  # of the time of launches: what kernels of few tokens take on the GPU itself
DRAWN_STEPS, DRAWN_PAIRS = 256, 2**18  # at most, by which the share of steps that are recorded is told


@dataclass(frozen=True)
class MemoryPlan:
    """How each step is cut. It never changes which examples form the step, nor its gradient."""

    micro_batch_tokens: int  # tokens of both sides in one forward
    chunk_tokens: int  # target tokens whose logits exist at a time
    gradient_checkpointing: bool
    predicted_peak_bytes: int
    graphs: bool = False  # forward and backward of a step in one micro-batch are recorded and replayed
    answers: int = ANSWERS_A_BATCH  # prompts answered together

    @property
    def cutting(self):
        return self.micro_batch_tokens, self.chunk_tokens, self.gradient_checkpointing

    def cut_as(self, cutting):
        """This plan with another's `cutting`."""
        names = ("micro_batch_tokens", "chunk_tokens", "gradient_checkpointing")
        return replace(self, **dict(zip(names, cutting, strict=True)))


class NothingFits(RuntimeError):
    """Not even the smallest plan fits the memory; `plan` is the one that ran out, where one was tried."""

    def __init__(self, message, plan=None):
        super().__init__(message)
        self.plan = plan


def recording_asked(config, spec, num_steps):
    """Whether steps are to be recorded as CUDA graphs: None where that fits the memory and takes less time.

    Raises ValueError where config.compile asks for what cannot be.
    """
    possible = spec.kernels and not spec.dropout
    if config.compile == "True" and not possible:
        raise ValueError(
            "compile=True records CUDA graphs, for which a GPU, bf16 and dropout=0 are needed: leave it out"
        )
    if config.compile == "True":
        return True
    repaid = possible and num_steps >= STEPS_THAT_REPAY_RECORDING
    return None if repaid and config.compile == "auto" else False


def choose_plan(config, estimate, usable_bytes, asked=False, calibration=None):
    """The plan that `config` asks for, or the fastest that fits `usable_bytes` (None on a CPU).

    `asked` as recording_asked gives it; `calibration` is what a probe measured over what was predicted for its
    examples. Raises ValueError when one example, or a step to be recorded, does not fit the micro-batch that `config`
    names, NothingFits when one example does not fit the memory. Steps that no recording holds are done as planned, with
    the recordings' memory beside.
    """
    if 0 < config.micro_batch_tokens < estimate.lengths.longest:
        raise ValueError(
            f"micro_batch_tokens={config.micro_batch_tokens}: the longest example has {estimate.lengths.longest} "
            "tokens on both sides: give at least that, or lower --max_seq_len"
        )
    if usable_bytes is None:
        tokens = _wanted_tokens(config, estimate, CPU_MICRO_BATCH_TOKENS)
        return _plan(estimate, math.inf, tokens, 1024, CHECKPOINTING[config.gradient_checkpointing][0])
    if config.compile == "True" and 0 < config.micro_batch_tokens < (size := _recorded_steps(estimate)[0][0]):
        raise ValueError(
            f"--compile=True records steps in one forward, {estimate.share_pairs} pairs in {size} tokens at least, "
            f"and --micro_batch_tokens={config.micro_batch_tokens} cuts them: leave one of the two out"
        )
    usable_share = PROBED_USABLE / calibration if calibration else USABLE  # of predicted bytes
    # the costliest of all forwards is met by chance, hardly ever, and is then done again in parts: once it is known how
    # much is used, those of the longest responses have to fit, as steps are cut
    met = estimate.of_longest_responses if calibration else estimate
    plain = list(_fitting_plans(config, met, usable_bytes, usable_share))
    if not plain:
        raise NothingFits(_refusal(config, estimate, usable_bytes, usable_share))
    if asked is False:
        return _fastest(plain, estimate)
    recorded = list(_recorded_plans(config, estimate, usable_bytes, usable_share))
    if asked:
        return replace(_fastest(recorded or plain, estimate), graphs=True)
    return _fastest(recorded + plain, estimate)


def _wanted_tokens(config, estimate, largest):
    longest = estimate.lengths.longest
    return config.micro_batch_tokens or max(min(estimate.share_pairs * longest, largest), longest)


def _ways(config, estimate):
    """Each (chunk_tokens, checkpointing) that `config` allows.

    In a step of few tokens a large chunk's logits would outweigh the activations.
    """
    most = max(estimate.share_pairs * estimate.lengths.mean / CHUNKS_A_STEP, 512)
    return product([chunk for chunk in CHUNKS if chunk <= most], CHECKPOINTING[config.gradient_checkpointing])


def _fitting_plans(config, estimate, usable_bytes, usable_share):
    """For each way the plan with the largest micro-batch that fits."""
    tokens = _wanted_tokens(config, estimate, LARGEST_MICRO_BATCH_TOKENS)
    for way in _ways(config, estimate):
        plan = fitting_plan(estimate, tokens, usable_bytes * usable_share, *way)
        if plan and plan.micro_batch_tokens >= config.micro_batch_tokens:
            yield plan


def _recorded_plans(config, estimate, usable_bytes, usable_share):
    """For each way, and each size up to which steps may be recorded, the largest plan that fits beside the recordings.

    No probe records a step, so what one measured says nothing of what recordings keep. They fill the memory to the
    last, and are all lost by the first forward that runs out: the costliest there could be has to fit beside them.
    """
    sizes = [size for size, _ in _recorded_steps(estimate)]
    tokens = config.micro_batch_tokens or max(_wanted_tokens(config, estimate, LARGEST_MICRO_BATCH_TOKENS), sizes[-1])
    for way, (size, larger) in product(_ways(config, estimate), pairwise([*sizes, tokens + 1])):
        beside = estimate.recording_bytes(size, *way) / USABLE
        plan = fitting_plan(estimate, min(tokens, larger - 1), (usable_bytes - beside) * usable_share, *way)
        if plan and plan.micro_batch_tokens >= max(config.micro_batch_tokens, size, estimate.lengths.longest):
            yield replace(plan, graphs=True)


def _fastest(plans, estimate):
    return min(plans, key=lambda plan: (round(time_factor(plan, estimate), 3), -plan.micro_batch_tokens))


@lru_cache(maxsize=1)
def _recorded_steps(estimate):
    """[(Tokens, share of steps that Rooms of up to so many hold)], from the smallest on: few where pairs are few."""
    lengths, share_pairs = estimate.lengths, estimate.share_pairs
    buckets = buckets_for(lengths.tokens, share_pairs, lengths.counts)
    draw, num_steps = np.random.default_rng(0), min(DRAWN_STEPS, max(DRAWN_PAIRS // share_pairs, 16))
    kinds = draw.choice(len(lengths.counts), (num_steps, share_pairs), p=lengths.counts / lengths.counts.sum())
    steps = [lengths.tokens[step] for step in kinds]
    least = np.array(
        [min((bucket.tokens for bucket in buckets if bucket.holds(step)), default=math.inf) for step in steps]
    )
    return [(size, float(np.mean(least <= size))) for size in sorted({bucket.tokens for bucket in buckets})]


def _recorded(estimate, plan):
    """(Tokens of the largest step that `plan` records, share of steps that it does)."""
    sizes = [pair for pair in _recorded_steps(estimate) if plan.graphs and pair[0] <= plan.micro_batch_tokens]
    return sizes[-1] if sizes else (0, 0.0)


def recording_bytes(estimate, plan):
    """Bytes that the recordings of `plan` keep for themselves; 0 without."""
    size, _ = _recorded(estimate, plan)
    return estimate.recording_bytes(size, *plan.cutting[1:]) if size else 0


def predicted_peaks(estimate, plan):
    """Peak reserved bytes on the device by phase; recordings are held from the first recorded step on."""
    peaks = estimate.peaks(*plan.cutting, plan.answers)
    if not plan.graphs:
        return peaks
    later = dict(recorded_step="step", evaluation="evaluation", generation="generation", save="save")
    return peaks | {name: peaks[phase] + recording_bytes(estimate, plan) for name, phase in later.items()}


def _plan(estimate, limit_bytes, *cutting):
    answers = ANSWERS_A_BATCH
    while answers > 1 and estimate.peaks(*cutting, answers)["generation"] > limit_bytes:
        answers //= 2
    return MemoryPlan(*cutting, predicted_peak_bytes=estimate.step_peak(*cutting), answers=answers)


def fitting_plan(estimate, wanted_tokens, limit_bytes, chunk_tokens, checkpointing):
    """The plan with the largest micro-batch up to `wanted_tokens` that fits, or None where one example does not."""
    if estimate.step_peak(wanted_tokens, chunk_tokens, checkpointing) <= limit_bytes:
        return _plan(estimate, limit_bytes, wanted_tokens, chunk_tokens, checkpointing)
    longest = estimate.lengths.longest
    fits, too_many = longest, wanted_tokens
    if estimate.step_peak(fits, chunk_tokens, checkpointing) > limit_bytes:
        return None
    while too_many - fits > _near(fits):
        middle = (fits + too_many) // 2
        if estimate.step_peak(middle, chunk_tokens, checkpointing) <= limit_bytes:
            fits = middle
        else:
            too_many = middle
    missing = -fits % longest  # many examples may be as long as the longest: a whole number of them is worth much
    fits += missing if missing <= min(_near(fits), wanted_tokens - fits) else 0
    return _plan(estimate, limit_bytes, fits, chunk_tokens, checkpointing)


def _near(tokens):
    """Tokens that make no difference to whether so many fit."""
    return max(64, tokens // 64)


def time_factor(plan, estimate):
    """Predicted time of a step, over the same step in one forward without limits."""
    once, tokens = estimate.spec.launch_tokens, estimate.share_pairs * estimate.lengths.mean
    _, recorded = _recorded(estimate, plan)
    time = recorded * _step_time(plan, estimate, RECORDED_LAUNCHES * once)
    return (time + (1 - recorded) * _step_time(plan, estimate, once)) / max(tokens, once)


def _step_time(plan, estimate, once):
    """Time of a step, in tokens computed meanwhile; `once` is that of a forward's and backward's launches.

    A forward lasts as long as its tokens or as its launches, whichever is longer.
    """
    forwards = estimate.forwards(plan.micro_batch_tokens)
    tokens = estimate.share_pairs * estimate.lengths.mean / forwards
    work, launches = tokens, once
    if plan.gradient_checkpointing:
        work, launches = CHECKPOINTING_WORK * work, CHECKPOINTING_LAUNCHES * launches
    return forwards * (max(work, launches) + tokens / plan.chunk_tokens * CHUNK_LAUNCHES * once)


def phase_problem(peaks, usable_bytes):
    """Which phase of these peaks by phase does not fit and what to type, or nothing."""
    name, needed = max(peaks.items(), key=lambda item: item[1])
    if usable_bytes is None or needed <= usable_bytes:
        return ""
    remedy = "lower --max_seq_len"
    if name == "generation":  # of one answer at a time: the plan halves their number first
        remedy = "type --bleu_pairs=0, which generates no answers, or lower --max_seq_len or --max_new_tokens"
    return f"{name} needs {needed / 2**30:.2f} GiB and {usable_bytes / 2**30:.2f} GiB are there: {remedy}"


def _refusal(config, estimate, usable_bytes, usable_share):
    longest = estimate.lengths.longest
    checkpointing = config.gradient_checkpointing != "False"
    tokens = max(config.micro_batch_tokens, longest)
    needed = estimate.step_peak(tokens, CHUNKS[-1], checkpointing) / usable_share
    parts = ", ".join(f"{name} {count / 2**30:.2f}" for name, count in estimate.fixed.items())
    room = "free the GPU"
    if limit := config.gpu_memory_limit_gb:
        enough = limit + (needed - usable_bytes) / 2**30 + 0.01
        room = f"type --gpu_memory_limit_gb={enough:.2f} or more, if the GPU has it"
    return (
        f"a forward of {tokens} tokens (the longest example has {longest}) needs {needed / 2**30:.2f} GiB and "
        f"{max(usable_bytes, 0) / 2**30:.2f} GiB are there; held all the time, in GiB: {parts}. Lower --max_seq_len "
        f"(now {config.max_seq_len}), type --optimizer=adafactor, choose a smaller --model, or {room}"
    )
