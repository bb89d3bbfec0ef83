"""Model FLOPs of training steps of a decoder from scratch, as a share of an H100's 989 TFLOP/s in bf16.

    python -m bench.model_flops [--model mini] [--tokens 512] [--step_tokens 65536] [--vocab_size 6400] [--kernels 0]
    python -m bench.model_flops --rehearse                                           on the CPU, tiny steps

A step is one optimizer update with Muon over sequences of so many random tokens, cut as the plan cuts it; all but the
first token of a sequence are targets. Model FLOPs: 6 for each token and weight of a matrix, the head included, plus
causal attention (half of all scores), backward twice forward; nothing that is computed again counts. The first steps
record CUDA graphs and are not timed. Prints a JSON line, and the milliseconds of the --kernels that take most.
"""

import argparse
import json
import os
import time
from dataclasses import dataclass, replace

os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as train_low_mem.py sets it
import numpy as np
import torch

from bench.one_step import Setting
from bench.runs import context_of, schedule_of
from bench.step_profile import profile_steps, rows
from config import MODELS
from model.commands.machine import launch_tokens_here
from model.commands.option_values import load_config
from model.commands.recipe import plan_options
from model.commands.setup import set_memory_limit
from model.data.length_histogram import Lengths
from model.memory.estimate import Estimate
from model.memory.plan import choose_plan
from model.nn.memory_spec import count_numbers
from model.nn.registry import family_of, load_model_config
from model.runtime.device_memory import peak_memory, reset_peak
from model.runtime.distributed import Ranks
from model.train.dry_run import dry_run_update
from model.train.optim import make_optimizer
from model.train.step import Position, train_steps
from tests.parts import make_spec

H100_FLOPS = 989e12  # a second, dense bf16
WARM_STEPS, TIMED_STEPS, PROFILED_STEPS = 16, 32, 5


@dataclass(frozen=True)
class Texts:
    """A token store of `count` random texts of one length; the first token of each is its prompt."""

    count: int
    num_tokens: int
    vocab_size: int

    @property
    def lengths(self):
        return np.tile(np.array([1, self.num_tokens - 1], np.uint16), (self.count, 1))

    @property
    def meta(self):
        return dict(source=dict(max_seq_len=self.num_tokens))

    def __len__(self):
        return self.count

    def tokens(self, ids):
        draw = np.random.default_rng(int(ids[0]))
        return tuple(draw.integers(3, self.vocab_size, len(ids) * n) for n in (1, self.num_tokens - 1))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="mini", choices=[name for name in MODELS if name.startswith("mini")])
    parser.add_argument("--tokens", type=int, default=512, help="of a text")
    parser.add_argument("--step_tokens", type=int, default=65_536)
    parser.add_argument("--vocab_size", type=int, default=6400)
    parser.add_argument("--kernels", type=int, default=0, help="that are listed, largest first")
    parser.add_argument("--rehearse", action="store_true")
    options = parser.parse_args()
    sizes = replace(load_model_config(options.model), vocab_size=options.vocab_size)
    step_tokens, steps = options.step_tokens, (WARM_STEPS, TIMED_STEPS)
    if options.rehearse:
        sizes, step_tokens, steps = replace(sizes, num_hidden_layers=1), 2 * options.tokens, (1, 1)
    step, profiled = step_tokens // options.tokens, PROFILED_STEPS if options.kernels else 0
    texts = Texts(step * (sum(steps) + 11 * profiled), options.tokens, options.vocab_size)
    values, kernels = measured(sizes, texts, step, steps, profiled, options.rehearse)
    flops = values["tokens_per_second"] * flops_of_a_token(sizes, options.tokens)
    values |= dict(model_tflops=round(flops / 1e12, 1), share_of_989=round(flops / H100_FLOPS, 4))
    device = "CPU" if options.rehearse else torch.cuda.get_device_name(0)
    print(json.dumps(dict(model=options.model, device=device) | values))
    print(*rows(kernels, options.kernels), sep="\n")


def flops_of_a_token(sizes, num_tokens):
    """Model FLOPs of a token of a text, forward and backward."""
    matrices = count_numbers(family_of(sizes), sizes).matrices + sizes.vocab_size * sizes.hidden_size
    return 6 * matrices + 6 * sizes.num_hidden_layers * num_tokens * sizes.query_width


def measured(sizes, texts, step, counts, profiled, rehearse):
    """({figure: value}, kernels as of `profile_steps`) of training on `texts`, `step` of them at a time.

    `counts` are the steps before the timing and in it; with `profiled` so many steps are profiled after it.
    """
    config = load_config("pretrain", dict(bleu_pairs=0, warmup_steps=0))
    setting = Setting(config, sizes, rehearse, 1, 1)
    device = setting.device
    _, usable = set_memory_limit(device, config.gpu_memory_limit_gb)
    spec = make_spec(config, sizes, setting.dtype, device.type, launch_tokens_here())
    lengths = Lengths(texts.lengths[:1].astype(np.int64), np.array([len(texts)]))
    asked = None if spec.kernels else False  # as in a run of many steps
    plan = choose_plan(plan_options(config), Estimate(spec, lengths, step), usable, asked)
    model, ranks = setting.model(), Ranks(0, 1, 0, device, "none", None)
    optimizer, schedule = make_optimizer(model, config), schedule_of(config, len(texts), step)
    dry_run_update(ranks, model, optimizer)
    context = context_of(ranks, model, optimizer, texts, config, schedule)
    steps, times = train_steps(context, Position(plan)), []
    reset_peak(device)
    for count in counts:
        for _ in range(count):
            next(steps)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter())
    seconds = (times[1] - times[0]) / counts[1]
    kernels = profile_steps(steps, device, argparse.Namespace(profiled_steps=profiled))[0] if profiled else {}
    return dict(
        tokens_per_second=round(step * texts.num_tokens / seconds), step_ms=round(seconds * 1e3, 2),
        micro_batch_tokens=plan.micro_batch_tokens, recomputed_blocks=plan.gradient_checkpointing, recorded=plan.graphs,
        reserved_gib=round((peak_memory(device)[1] or 0) / 2**30, 2),
    ), kernels  # fmt: skip


if __name__ == "__main__":
    main()
