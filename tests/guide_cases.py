"""The LoRA guides' cases, and what `plan` says of them beside the memory that the guides give."""

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

from model.commands.option_values import load_config
from model.commands.plan_report import GIB, preview
from model.memory.plan import NothingFits, phase_problem
from tests.sizes import QWEN_VOCAB_SIZE, QWENS

STEPS_PER_GIB, LARGEST_GIB = 4, 80


@dataclass(frozen=True)
class Case:
    """A case of a guide, and the memory that the guide says it takes."""

    name: str
    shape: str
    precision: str
    lora: dict
    pairs: tuple  # batch, accumulation
    tokens: int  # of the longest dialogue
    card: float  # GiB of the guide's GPU
    told: str


ATTENTION = "q_proj,k_proj,v_proj,o_proj"
PROFILE, FEW = dict(lora_rank=16, lora_targets=ATTENTION), dict(lora_targets="q_proj,v_proj")
CASES = (
    Case("the one that died", "qwen1.5-7b", "nf4", dict(lora_rank=64), (2, 8), 2048, 16, "out of memory at 16"),
    Case("scheme 1", "qwen1.5-7b", "nf4", dict(lora_rank=32), (1, 16), 1024, 16, "10 to 12"),
    Case("scheme 3", "qwen1.5-7b", "nf4", dict(lora_rank=16), (1, 32), 512, 16, "8 to 10"),
    Case("deepspeed", "qwen1.5-1.8b", "auto", PROFILE, (4, 4), 2048, 16, "above 12"),
    Case("stage2_offload", "qwen1.5-1.8b", "auto", PROFILE, (3, 6), 1792, 12, "6 to 12"),
    Case("stage3", "qwen1.5-1.8b", "auto", PROFILE, (2, 8), 1536, 6, "4 to 6"),
    Case("minimal, in four bits", "qwen1.5-1.8b", "nf4", PROFILE, (1, 16), 1024, 4, "below 4"),
    Case("before", "qwen3-4b", "nf4", FEW | dict(lora_rank=16), (2, 8), 512, 16, "10 to 12"),
    Case("after", "qwen3-4b", "nf4", FEW | dict(lora_rank=4), (1, 16), 256, 16, "4 to 6"),
)


def row_of(case):
    """Cells of a case's row."""
    smallest = _smallest_card(case)
    found = planned(case, max(case.card, smallest))
    plan, peak = found["plan"], max(found["phases"].values())
    state = found["fixed_bytes"]["optimizer"]
    cut = f"{peak / GIB:.1f} GiB, {min(plan['micro_batch_tokens'], _step_tokens(case)):,} tokens in one forward"
    base = f"{case.shape.title()}, {'NF4' if case.precision == 'nf4' else 'bf16'}"
    return [
        case.name, base, str(case.lora["lora_rank"]), f"{case.pairs[0]} × {case.tokens:,}", case.told,
        f"{smallest:.2f}", cut, f"{state / GIB:.2f}", f"{0.75 * state / peak:.1%} of the peak",
    ]  # fmt: skip


def _step_tokens(case):
    return case.pairs[0] * case.pairs[1] * case.tokens


def _smallest_card(case):
    """The least GiB for which a case can be planned."""
    low, high = 0, LARGEST_GIB * STEPS_PER_GIB
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if planned(case, middle / STEPS_PER_GIB) else (middle, high)
    return high / STEPS_PER_GIB


def planned(case, limit):
    """What `plan` finds for a case on a card of `limit` GiB; None if it does not fit."""
    sizes = dict(QWENS[case.shape])
    batch, accumulation = case.pairs
    with tempfile.TemporaryDirectory() as folder:
        shape = Path(folder, "model.json")
        shape.write_text(json.dumps(dict(family=sizes.pop("model_type", "qwen2")) | sizes))
        options = dict(
            model=str(shape), base_precision=case.precision, max_seq_len=case.tokens, batch_size_per_gpu=batch,
            gradient_accumulation_steps=accumulation, validation_file="", gpu_memory_limit_gb=limit,
            train_file=str(Path(folder, "none")),
        )  # fmt: skip
        try:
            config = load_config("pretrain", case.lora | options)
            found = preview(config, (), num_processes=1, vocab_size=QWEN_VOCAB_SIZE)
        except (NothingFits, ValueError):  # ValueError: the CUDA context alone takes more
            return None
    return None if phase_problem(found["phases"], found["machine"]["usable_bytes"]) else found
