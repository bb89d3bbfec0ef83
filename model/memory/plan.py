"""Chooses the plan: how a step is cut into micro-batches so that it fits the memory, and whether it is captured."""

import math
from dataclasses import dataclass, replace
from itertools import product

from model.memory.estimate import Estimate
from model.memory.step_time import graph_sizes, time_factor

USABLE = 0.95  # share of memory to plan for without a probe: predictions err by 2 %, varying sizes fragment memory
PROBED_USABLE = 0.98  # the same after a probe measured the plan
CHUNKS = (8192, 4096, 2048, 1024, 512, 256, 128)  # target tokens whose logits exist at the same time
MIN_CHUNKS_PER_STEP = 16  # a chunk is at most this share of a mean step's tokens of all columns, or 512
LARGE_CHUNK = 2048  # a plan has larger ones only if the peak of its largest forward stays the same
CPU_MICRO_BATCH_TOKENS = 8192  # larger ones are not faster on a CPU
LARGEST_MICRO_BATCH_TOKENS = 262_144  # larger ones are not faster on a GPU
STEPS_THAT_REPAY_GRAPHS = 100  # capturing takes about 1 s and save up to 10 ms per step
CHECKPOINTED_SHARES = (0, 0.25, 0.5, 0.75, 1)  # of the blocks, from which the fastest plan is chosen first


@dataclass(frozen=True)
class MemoryPlan:
    """How each step is cut. A plan changes neither the examples of a step nor, except for rounding, its gradient."""

    micro_batch_tokens: int  # tokens of all columns per forward
    chunk_tokens: int  # target tokens whose logits exist at the same time
    gradient_checkpointing: int  # blocks, the first of the network, whose activations backward computes again
    predicted_peak_bytes: int
    graphs: bool = False  # steps of one micro-batch are captured as CUDA graphs and replayed
    answers: int = 1  # generated together

    @property
    def batching(self):
        return self.micro_batch_tokens, self.chunk_tokens, self.gradient_checkpointing

    def batched_as(self, batching):
        """This plan with the `batching` of another plan."""
        names = ("micro_batch_tokens", "chunk_tokens", "gradient_checkpointing")
        return replace(self, **dict(zip(names, batching, strict=True)))


@dataclass(frozen=True)
class PlanOptions:
    """What the user asks of a plan; the fields are those of TrainConfig."""

    micro_batch_tokens: int
    gradient_checkpointing: str
    compile: str
    max_seq_len: int
    gpu_memory_limit_gb: float


class NothingFits(RuntimeError):
    """The smallest plan does not fit the memory. `plan` is the plan that ran out of memory, None if it never ran."""

    def __init__(self, message, plan=None):
        super().__init__(message)
        self.plan = plan


def graphs_asked(wanted, spec, num_steps):
    """Whether to capture steps as CUDA graphs: True, False, or None to let choose_plan take the faster plan.

    None is captured whose blocks' inputs leave the device. Raises ValueError if compile=True is impossible.
    """
    if wanted.compile == "True" and not spec.kernels:
        raise ValueError("compile=True captures CUDA graphs, which need a GPU and bf16: leave it out")
    if wanted.compile == "True":
        return True
    repaid = spec.can_capture and num_steps >= STEPS_THAT_REPAY_GRAPHS
    return None if repaid and wanted.compile == "auto" else False


def choose_plan(wanted, estimate, usable_bytes, asked=False, calibration=None):
    """The MemoryPlan that `wanted` (PlanOptions) asks for, or the fastest that fits `usable_bytes` (None on a CPU).

    `asked` is the result of graphs_asked; `calibration` is measured / predicted bytes of a probe. CUDA graphs and the
    steps that fit none of them share their memory, so a plan needs no more with graphs than without.

    Raises ValueError if the longest example, or a step to capture, exceeds wanted.micro_batch_tokens, and NothingFits
    if the longest example does not fit the memory.
    """
    if 0 < wanted.micro_batch_tokens < estimate.lengths.longest:
        raise ValueError(
            f"micro_batch_tokens={wanted.micro_batch_tokens}: the longest example has {estimate.lengths.longest} "
            "tokens, source and target together: type at least that, or lower --max_seq_len"
        )
    if usable_bytes is None:
        tokens = _wanted_tokens(wanted, estimate, CPU_MICRO_BATCH_TOKENS)
        return Room(estimate).plan(tokens, 1024, allowed_checkpointing(wanted.gradient_checkpointing, estimate)[0])
    if wanted.compile == "True" and 0 < wanted.micro_batch_tokens < (size := graph_sizes(estimate)[0][0]):
        raise ValueError(
            f"--compile=True captures a step as one forward of at least {size} tokens ({estimate.share_pairs} pairs), "
            f"but --micro_batch_tokens={wanted.micro_batch_tokens} cuts it: leave one of the two out"
        )
    usable_share = PROBED_USABLE / calibration if calibration else USABLE  # of predicted bytes
    # The worst possible micro-batch is very rare, and the retry handles it. So after a probe, which tells how much
    # memory is used, only the forwards with the longest targets must fit.
    planned_for = estimate.of_longest_targets if calibration else estimate
    plain = Room(planned_for, usable_bytes * usable_share)
    without_graphs = list(_fitting_plans(wanted, plain))
    if not without_graphs:
        raise NothingFits(_refusal(wanted, estimate, usable_bytes, usable_share))
    # the first forward that runs out of memory drops all CUDA graphs, so with them the costliest one possible must fit
    room, kinds = replace(plain, estimate=estimate), [without_graphs]
    if asked is not False:
        with_graphs = [list(_plans_with_graphs(wanted, room, tokens)) for tokens in _graph_tokens(wanted, estimate)]
        kinds = with_graphs if asked and any(with_graphs) else [without_graphs, *with_graphs]
    best = [_fastest(kind, estimate) for kind in kinds if kind]
    if wanted.gradient_checkpointing == "auto":
        best = [_checkpointing_least(plan, room if plan.graphs else plain) for plan in best]
    plan = _fastest(best, estimate)
    return replace(plan, graphs=True) if asked else plan


@dataclass(frozen=True)
class Room:
    """The memory that plans must fit."""

    estimate: Estimate
    limit_bytes: float = math.inf  # predicted bytes

    def holds(self, *batching):
        """Whether a step cut this way fits."""
        return self.estimate.step_peak(*batching) <= self.limit_bytes

    def plan(self, *batching, graphs=False):
        """The MemoryPlan of this batching."""
        answers, peak = self.estimate.answers.count, self.estimate.step_peak(*batching)
        while answers > 1 and self.estimate.peaks(*batching, answers)["generation"] > self.limit_bytes:
            answers //= 2
        return MemoryPlan(*batching, peak, graphs, answers)


def _checkpointing_least(plan, room):
    """`plan` with the fewest checkpointed blocks that fit; the others then need not be computed again."""
    least, most = 0, plan.gradient_checkpointing
    while least < most:
        middle = (least + most) // 2
        if room.holds(*plan.batching[:2], middle):
            most = middle
        else:
            least = middle + 1
    return room.plan(*plan.batching[:2], most, graphs=plan.graphs)


def allowed_checkpointing(option, estimate):
    """The numbers of checkpointed blocks, ascending, that a plan may have by the value of the option."""
    return {"auto": range(estimate.num_blocks + 1), "True": [estimate.num_blocks], "False": [0]}[option]


def _wanted_tokens(wanted, estimate, largest):
    longest = estimate.lengths.longest
    return wanted.micro_batch_tokens or max(min(estimate.share_pairs * longest, largest), longest)


def _variants(wanted, estimate):
    """Variants of a plan, each (chunk_tokens, checkpointing), that `wanted` allows; some of the numbers of blocks.

    Leaves out large chunks for steps of few tokens, whose logits would take more memory than the activations.
    """
    max_chunk = max(512, estimate.share_pairs * estimate.lengths.mean / MIN_CHUNKS_PER_STEP)
    chunks = [chunk for chunk in CHUNKS if chunk <= max_chunk]
    allowed, blocks = allowed_checkpointing(wanted.gradient_checkpointing, estimate), estimate.num_blocks
    numbers = sorted({number for share in CHECKPOINTED_SHARES if (number := round(share * blocks)) in allowed})
    return product(chunks, numbers)


def _keeps_peak(batching, estimate):
    """Whether a step cut this way needs no more memory than with chunks of LARGE_CHUNK tokens."""
    tokens, chunk, checkpointing = batching
    small = min(chunk, LARGE_CHUNK)
    return chunk == small or estimate.step_peak(*batching) <= estimate.step_peak(tokens, small, checkpointing)


def _fitting_plans(wanted, room):
    """The plan with the largest micro-batch that fits, for each variant for which one does."""
    tokens = _wanted_tokens(wanted, room.estimate, LARGEST_MICRO_BATCH_TOKENS)
    for variant in _variants(wanted, room.estimate):
        plan = fitting_plan(room, tokens, *variant)
        if plan and plan.micro_batch_tokens >= wanted.micro_batch_tokens and _keeps_peak(plan.batching, room.estimate):
            yield plan


def _graph_tokens(wanted, estimate):
    """The micro-batches that plans with graphs may have: the sizes to capture, and the largest step, in tokens."""
    sizes = [size for size, _ in graph_sizes(estimate)]
    if wanted.micro_batch_tokens:
        return [wanted.micro_batch_tokens] * (wanted.micro_batch_tokens >= sizes[0])
    largest = _wanted_tokens(wanted, estimate, LARGEST_MICRO_BATCH_TOKENS)
    return sorted({max(size, estimate.lengths.longest) for size in sizes} | {max(largest, sizes[-1])})


def _plans_with_graphs(wanted, room, micro_batch_tokens):
    """The plan with micro-batches of so many tokens, for each variant for which they fit."""
    for variant in _variants(wanted, room.estimate):
        if room.holds(*(batching := (micro_batch_tokens, *variant))) and _keeps_peak(batching, room.estimate):
            yield room.plan(micro_batch_tokens, *variant, graphs=True)


def _fastest(plans, estimate):
    return min(plans, key=lambda plan: (round(time_factor(plan, estimate), 3), -plan.micro_batch_tokens))


def graph_bytes(estimate, plan):
    """Bytes that the CUDA graphs of `plan` hold, and the steps that it does not capture; 0 without graphs."""
    return estimate.graph_bytes(*plan.batching) if plan.graphs else 0


def keeps_graphs(estimate, plan, usable_bytes):
    """Whether evaluations fit beside what the graphs of `plan` hold; otherwise these are deleted before each."""
    peaks = estimate.peaks(*plan.batching, plan.answers)
    needed = max(peaks["evaluation"], peaks["generation"]) + graph_bytes(estimate, plan)
    return usable_bytes is None or needed <= USABLE * usable_bytes


def predicted_peaks(estimate, plan, usable_bytes):
    """{phase: peak reserved bytes on the device}, with the graphs that later phases keep."""
    peaks, held = estimate.peaks(*plan.batching, plan.answers), graph_bytes(estimate, plan)
    keeps = keeps_graphs(estimate, plan, usable_bytes)
    return peaks | {phase: peaks[phase] + held for phase in ("save", *("evaluation", "generation") * keeps)}


def fitting_plan(room, wanted_tokens, *variant):
    """The plan with the largest micro-batch up to `wanted_tokens` that fits; None if the longest example does not.

    `variant` is (chunk_tokens, checkpointing).
    """
    if room.holds(wanted_tokens, *variant):
        return room.plan(wanted_tokens, *variant)
    longest, unit = room.estimate.lengths.longest, room.estimate.lengths.unit
    if not room.holds(longest, *variant):
        return None
    fits, exceeds = longest // unit, -(-wanted_tokens // unit)  # in units: between two, no more examples fit
    while exceeds - fits > max(_search_tolerance(fits * unit) // unit, 1):
        middle = (fits + exceeds) // 2
        if room.holds(middle * unit, *variant):
            fits = middle
        else:
            exceeds = middle
    fits *= unit
    to_multiple = -fits % longest  # often many examples are as long as the longest, so a multiple of it packs best
    fits += to_multiple if to_multiple <= min(_search_tolerance(fits), wanted_tokens - fits) else 0
    return room.plan(fits, *variant)


def _search_tolerance(tokens):
    """Tolerance of the search for the largest micro-batch, in tokens."""
    return max(64, tokens // 64)


def phase_problem(peaks, usable_bytes):
    """Message that names the largest phase and what to type if it does not fit, or an empty string."""
    name, needed = max(peaks.items(), key=lambda item: item[1])
    if usable_bytes is None or needed <= usable_bytes:
        return ""
    remedy = "lower --max_seq_len"
    if name == "generation":  # with one answer at a time: the plan halves their number first
        remedy = "type --bleu_pairs=0, which generates no answers, or lower --max_seq_len or --max_new_tokens"
    return f"{name} needs {needed / 2**30:.2f} GiB and {usable_bytes / 2**30:.2f} GiB are there: {remedy}"


def _refusal(wanted, estimate, usable_bytes, usable_share):
    longest = estimate.lengths.longest
    checkpointing = allowed_checkpointing(wanted.gradient_checkpointing, estimate)[-1]
    tokens = max(wanted.micro_batch_tokens, longest)
    needed = estimate.step_peak(tokens, CHUNKS[-1], checkpointing) / usable_share
    parts = ", ".join(f"{name} {count / 2**30:.2f}" for name, count in estimate.fixed.items())
    remedy = "free the GPU"
    if limit := wanted.gpu_memory_limit_gb:
        enough = limit + (needed - usable_bytes) / 2**30 + 0.01
        remedy = f"type --gpu_memory_limit_gb={enough:.2f} or more, if the GPU has it"
    return (
        f"a forward of {tokens} tokens (the longest example has {longest}) needs {needed / 2**30:.2f} GiB and "
        f"{max(usable_bytes, 0) / 2**30:.2f} GiB are there; held all the time, in GiB: {parts}. Lower --max_seq_len "
        f"(now {wanted.max_seq_len}), type {_held_elsewhere(estimate.spec)}--optimizer=adafactor, choose a smaller "
        f"--model, or {remedy}"
    )


def _held_elsewhere(spec):
    """The options of AdamW that hold less on the device and that the run does not have, to be followed by others."""
    names = ["--offload=optimizer"] * (not spec.offloads)
    names += ["--master_dtype=bf16"] * (spec.has_masters and not spec.lora and spec.number_bytes == 2)
    return f"{' and '.join(names)} with AdamW, or " if names else ""
