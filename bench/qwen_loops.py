"""Compare the speed of an adapter on a Qwen in four bits with the loops of LoRA guides, on the same data in one run.

    python -m bench.qwen_loops --output_dir DIR [--loops ours,a,b] [--data mixed,full]     on one GPU, about 6 minutes
    python -m bench.qwen_loops --output_dir DIR --rehearse                                 on the CPU, a tiny Qwen

The shape of Qwen1.5-7B with random weights in NF4, rank 32 on all layers, under 16 GiB. a: transformers, PEFT and
bitsandbytes, SDPA, activation checkpointing, fused AdamW, padded batches; b: the same with Liger's kernels and batches
of similar lengths. Each takes the steps that ours takes last, b in an order of its own. Both are tried with 8 examples
a forward (full: 2), then with half as many until they get slower.
mixed: lengths up to 1,024, mean 300; full: 2,048 tokens. The second half of an example is learnt. Each loop is a
process of its own; one JSON line a result, and the last line holds the ratios to the best of a and of b. Needs
bitsandbytes and peft, b liger-kernel 0.8 too.
"""

import argparse
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as train_low_mem.py sets it
import numpy as np
import torch

from bench.children import Job, gpu_slots, run_jobs
from bench.one_step import Setting
from bench.packed import TINY_QWEN
from bench.preference_pairs import Store, now
from bench.runs import context_of, schedule_of
from model.commands.machine import launch_tokens_here
from model.commands.option_values import load_config
from model.commands.recipe import plan_options
from model.commands.setup import set_memory_limit
from model.data.length_histogram import histogram
from model.data.sampler import step_at
from model.memory.estimate import Estimate
from model.memory.plan import choose_plan
from model.nn.decoder.family import LAYERS
from model.nn.decoder.sizes import DecoderModelConfig
from model.runtime.device_memory import is_out_of_memory, peak_memory, release_memory, reset_peak
from model.runtime.distributed import Ranks
from model.train.dry_run import dry_run_update
from model.train.optim import make_optimizer
from model.train.step import Position, train_steps
from tests.parts import make_spec
from tests.sizes import QWEN_RANK, QWEN_VOCAB_SIZE, QWENS

LIMIT_GIB, STEP_EXAMPLES = 16, dict(mixed=8, full=2)
BATCHES = dict(mixed=(8, 4, 2, 1), full=(2, 1))  # examples in a forward of a and b
WARM_STEPS, TIMED_STEPS, JOB_SECONDS = 8, 8, 300  # the first steps compile Triton's kernels, Liger's too
RECORDING_STEPS = 32  # that ours takes before them: each size of a step is captured when it comes first


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--loops", default="ours,a,b")
    parser.add_argument("--data", default="mixed,full")
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        return time_loop(options.loops, options.data.split(","), options.rehearse)
    folder = Path(options.output_dir).resolve()
    words = [sys.executable, "-m", "bench.qwen_loops", "--one", "--data", options.data, "--output_dir", folder]
    words += ["--rehearse"] * options.rehearse
    jobs = [Job(name, [*words, "--loops", name], JOB_SECONDS) for name in options.loops.split(",")]
    results = []
    for done in run_jobs(jobs, folder / "logs", gpu_slots(0 if options.rehearse else 1)):
        found = [json.loads(line) for line in done.text.splitlines() if line.startswith('{"loop"')]
        results += found + ([dict(loop=done.job.name, problem=done.problem)] if done.problem else [])
    results.append(ratios(results))
    lines = "".join(json.dumps(result) + "\n" for result in results)
    (folder / "results.jsonl").write_text(lines)
    print(lines, end="")


def ratios(results):
    """Our tokens a second over the best of each other loop, for each kind of data."""
    best = {}
    for result in results:
        if speed := result.get("tokens_per_second"):
            key = result["data"], result["loop"]
            best[key] = max(best.get(key, 0), speed)
    pairs = {(data, loop): best.get((data, "ours"), 0) / speed for (data, loop), speed in best.items()}
    return {f"{data}: ours over {loop}": round(x, 2) for (data, loop), x in pairs.items() if loop != "ours"}


def draw_lengths(data, steps, rehearse):
    """(examples, 2) tokens of both halves; of `mixed` up to 1,024 together, 300 in the mean."""
    count, most = steps * STEP_EXAMPLES[data], dict(mixed=1024, full=2048)[data] // (32 if rehearse else 1)
    totals = np.full(count, most)
    if data == "mixed":
        draws = np.random.default_rng(0).exponential(315 / 1024 * most, count)
        totals = np.clip(draws, most // 32, most).astype(np.int64)
    return np.stack([totals // 2, totals - totals // 2], axis=1)


def time_loop(loop, kinds, rehearse):
    """Print a JSON line for each setting of one loop, in this process."""
    device = torch.device("cpu" if rehearse else "cuda:0")
    config = load_config("pretrain", dict(
        lora_rank=QWEN_RANK, base_precision="nf4", bleu_pairs=0, warmup_steps=0, gpu_memory_limit_gb=LIMIT_GIB,
    ))  # fmt: skip
    sizes = (TINY_QWEN | dict(vocab_size=1000)) if rehearse else QWENS["qwen1.5-7b"] | dict(vocab_size=QWEN_VOCAB_SIZE)
    _, usable = set_memory_limit(device, config.gpu_memory_limit_gb)
    run = Run(loop, config, DecoderModelConfig(**sizes), device, usable, rehearse)
    for data in kinds:
        lengths, step = draw_lengths(data, RECORDING_STEPS + WARM_STEPS + TIMED_STEPS, rehearse), STEP_EXAMPLES[data]
        in_order = lengths[order_of(len(lengths), step, config.seed)]
        mean_tokens = round(float(in_order[-step * run.timed :].sum(1).mean()))
        if loop != "ours":
            lengths = in_order[-step * (run.warm + run.timed) :]
        for values in run.ours(data, lengths) if loop == "ours" else run.theirs(data, lengths):
            values = dict(loop=loop, data=data, mean_tokens=mean_tokens) | values
            print(json.dumps(values), flush=True)


def order_of(count, step, seed):
    """The numbers of `count` examples in the order in which `train_steps` takes them, `step` at a time."""
    return np.concatenate([step_at(seen, count, step, seed).ids for seen in range(0, count, step)])


@dataclass(frozen=True)
class Run:
    """What the loops have in common."""

    loop: str
    config: object
    model_config: DecoderModelConfig
    device: torch.device
    usable_bytes: int | None
    rehearse: bool

    @property
    def warm(self):
        own = RECORDING_STEPS if self.loop == "ours" else 0
        return 1 if self.rehearse else own + WARM_STEPS

    @property
    def timed(self):
        return 1 if self.rehearse else TIMED_STEPS

    def figures(self, tokens, started):
        speed = round(tokens / (now(self.device) - started), 1)
        return dict(tokens_per_second=speed, reserved_gib=round((peak_memory(self.device)[1] or 0) / 2**30, 2))

    def ours(self, data, lengths):
        """Yield the figures of `train_steps`, cut as the plan cuts a step."""
        release_memory()
        step, setting = STEP_EXAMPLES[data], Setting(self.config, self.model_config, self.rehearse, 1, 1)
        spec = make_spec(self.config, self.model_config, setting.dtype, self.device.type, launch_tokens_here())
        estimate = Estimate(spec, histogram(lengths), step)
        asked = None if spec.kernels else False  # as in a run of many steps
        plan = choose_plan(plan_options(self.config), estimate, self.usable_bytes, asked)
        model, ranks = setting.model(), Ranks(0, 1, 0, self.device, "none", None)
        optimizer, schedule = make_optimizer(model, self.config), schedule_of(self.config, len(lengths), step)
        dry_run_update(ranks, model, optimizer)
        store = Store(lengths, self.model_config.vocab_size, {})
        context, tokens, started = context_of(ranks, model, optimizer, store, self.config, schedule), 0, 0.0
        reset_peak(self.device)
        for number, result in enumerate(train_steps(context, Position(plan))):
            tokens += result.tokens if number >= self.warm else 0
            started = now(self.device) if number == self.warm - 1 else started
        cut = dict(micro_batch_tokens=plan.micro_batch_tokens, recomputed_blocks=plan.gradient_checkpointing)
        cut |= dict(recorded=plan.graphs)
        yield self.figures(tokens, started) | cut

    def theirs(self, data, lengths):
        """Yield the figures of a plain loop for each number of examples in a forward."""
        model, best = stock_model(self.model_config, self.device, liger=self.loop == "b"), 0
        for batch in BATCHES[data]:
            release_memory()
            reset_peak(self.device)
            try:
                values = self._timed(model, lengths, batch, STEP_EXAMPLES[data])
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                values = dict(problem="out of memory")
            model.zero_grad(set_to_none=True)
            yield dict(batch=batch) | values
            if (speed := values.get("tokens_per_second", best)) < best:
                return
            best = speed

    def _timed(self, model, lengths, batch, step):
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=self.device.type == "cuda")
        store, started, tokens = Store(lengths, self.model_config.vocab_size, {}), 0.0, 0
        ids = np.arange(len(lengths))
        if self.loop == "b":  # batches of similar lengths
            ids = np.argsort(lengths.sum(1), kind="stable").reshape(-1, batch)
            ids = np.random.default_rng(1).permutation(ids).ravel()
        for number, part in enumerate(ids.reshape(-1, step // batch, batch)):
            for own in part:
                loss = model(**padded(store, own, self.device)).loss / len(part)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            tokens += int(lengths[part].sum()) if number >= self.warm else 0
            started = now(self.device) if number == self.warm - 1 else started
        return self.figures(tokens, started)


def padded(store, ids, device):
    """The arguments of transformers' model for these examples, padded to the longest; the second half is learnt."""
    totals, rows = store.lengths[ids].sum(1), [np.concatenate(store.tokens(np.array([i]))) for i in ids]
    out = {name: torch.full((len(ids), int(totals.max())), fill) for name, fill in
           dict(input_ids=0, labels=-100, attention_mask=0).items()}  # fmt: skip
    for place, (row, first) in enumerate(zip(rows, store.lengths[ids, 0], strict=True)):
        row = torch.from_numpy(row)
        out["input_ids"][place, : len(row)], out["attention_mask"][place, : len(row)] = row, 1
        out["labels"][place, first : len(row)] = row[first:]
    return {name: x.to(device) for name, x in out.items()}


def stock_model(model_config, device, liger):
    """transformers' Qwen2 with random weights, its layers' matrices in bitsandbytes' NF4, with PEFT's adapters."""
    import peft
    from transformers import Qwen2Config, Qwen2ForCausalLM

    if liger:
        from liger_kernel.transformers import apply_liger_kernel_to_qwen2

        apply_liger_kernel_to_qwen2()
    c, dtype = model_config, torch.bfloat16 if device.type == "cuda" else torch.float32
    config = Qwen2Config(
        **{name: getattr(c, name) for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size",
                                               "num_attention_heads", "num_key_value_heads", "tie_word_embeddings")},
        attn_implementation="sdpa", use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = Qwen2ForCausalLM(config).to(dtype)
    model.to_empty(device=device)
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)  # its wavelengths are no weights
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.02) if p.dim() > 1 else torch.nn.init.ones_(p)
    for block in model.model.layers:
        for part, name in [(block.self_attn, n) for n in LAYERS[:4]] + [(block.mlp, n) for n in LAYERS[4:]]:
            setattr(part, name, _packed(getattr(part, name), dtype))
    model.is_loaded_in_4bit = True
    model.gradient_checkpointing_enable(dict(use_reentrant=False))
    model.enable_input_require_grads()
    lora = peft.LoraConfig(r=QWEN_RANK, lora_alpha=2 * QWEN_RANK, target_modules=list(LAYERS), task_type="CAUSAL_LM")
    return peft.get_peft_model(model, lora).train()


def _packed(layer, dtype):
    """bitsandbytes' layer with the weights of `layer`, in NF4 with double quantisation."""
    import bitsandbytes

    rows, columns = layer.weight.shape
    options = dict(compress_statistics=True, quant_type="nf4")
    with torch.device("meta"):
        packed = bitsandbytes.nn.Linear4bit(columns, rows, layer.bias is not None, compute_dtype=dtype, **options)
    weight = bitsandbytes.nn.Params4bit(layer.weight.data.cpu(), requires_grad=False, **options)
    packed.weight, packed.bias = weight.to(layer.weight.device), layer.bias
    return packed


if __name__ == "__main__":
    sys.exit(main())
