"""What preferences cost: DPO against fine-tuning on both responses of the same pairs, and against TRL's trainer.

    python -m bench.preferences --output_dir DIR [--parts small,qwen,trl] [--trl FOLDER]   on one GPU, about 10 minutes
    python -m bench.preferences --output_dir DIR --rehearse                                on the CPU, tiny networks

small: a T5 of the model small, whole, 128 pairs a step, lengths of short answers; qwen: a LoRA of rank 16 on the shape
of Qwen3-1.7B, bf16, random weights, 16 pairs a step, lengths up to 1,024 tokens. Each gives a JSON line for `sft` (both
responses of a pair as examples), for `dpo`, and for `repeated` (dpo, where a T5 reads a source once for each response):
seconds of a step, peak of the reserved memory, seconds for the reference of a step's pairs; then the ratios. Tokens are
those of the examples of `sft` in all of them. trl: TRL's DPOTrainer on the same pairs as `qwen`, PEFT's LoRA, its
reference without the adapter in each step; batches of 8, 4 and 2 pairs, with activation checkpointing and without, of
which the fastest counts. It needs trl (tried: 1.16), which --trl names where it is installed apart.
"""

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from bench.children import Job, gpu_slots, run_jobs
from bench.memory_fit import TINY_QWEN
from bench.one_step import Setting
from bench.runs import schedule_of
from config import MODELS
from model.commands.machine import launch_tokens_here
from model.commands.option_values import load_config
from model.commands.recipe import plan_options
from model.commands.setup import set_memory_limit
from model.memory.estimate import Estimate
from model.memory.plan import choose_plan
from model.nn.decoder.sizes import DecoderModelConfig
from model.nn.registry import family_of
from model.nn.t5.sizes import T5ModelConfig
from model.runtime.device_memory import is_out_of_memory, peak_memory, release_memory, reset_peak
from model.runtime.distributed import Ranks
from model.train.derive import with_zeros
from model.train.dry_run import dry_run_update
from model.train.evaluate import EPOCH, evaluating
from model.train.examples import Examples
from model.train.loader import Loader
from model.train.objectives.dialogues import Dialogues
from model.train.objectives.pairs import Pairs
from model.train.objectives.preference_dialogues import DialogueForm
from model.train.objectives.preference_losses import PreferenceLoss
from model.train.objectives.preference_pairs import PairForm
from model.train.objectives.preferences import Preferences
from model.train.optim import make_optimizer
from model.train.step import Position, StepContext, train_steps
from tests.data.qwen_tokenizer import make_qwen_tokenizer
from tests.parts import make_spec
from tests.sizes import QWEN_VOCAB_SIZE, draw_lengths

QWEN3_1_7B = dict(
    hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8,
    head_dim=128, tie_word_embeddings=True, model_type="qwen3",
)  # fmt: skip
RANK, VOCAB_SIZE, STEP_PAIRS = 16, 29_298, dict(small=128, qwen=16)
RECORDING, WARM, TIMED, JOB_SECONDS = 24, 4, 12, 500  # steps: each size is captured when it comes first
BATCHES = (8, 4, 2)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--parts", default="small,qwen,trl")
    parser.add_argument("--trl", default="")
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        part, _, name = options.one.partition("/")
        trained = time_trl(options) if part == "trl" else Run(part, name, options.rehearse).measure()
        for values in trained:
            print(json.dumps(dict(part=part, name=name) | values), flush=True)
        return
    folder = Path(options.output_dir).resolve()
    names = dict(small=("sft", "dpo", "repeated"), qwen=("sft", "dpo"), trl=("dpo",))
    words = [sys.executable, "-m", "bench.preferences", "--output_dir", folder, "--trl", options.trl]
    words += ["--rehearse"] * options.rehearse
    jobs = [
        Job(f"{part}/{name}", [*words, "--one", f"{part}/{name}"], JOB_SECONDS)
        for part in options.parts.split(",") for name in names[part]
    ]  # fmt: skip
    results = []
    for done in run_jobs(jobs, folder / "logs", gpu_slots(0 if options.rehearse else 1)):
        found = [json.loads(line) for line in done.text.splitlines() if line.startswith('{"part"')]
        results += found + ([dict(job=done.job.name, problem=done.problem)] if done.problem else [])
    lines = "".join(json.dumps(result) + "\n" for result in [*results, *ratios(results)])
    (folder / "results.jsonl").write_text(lines)
    print(lines, end="")


def ratios(results):
    """Time and memory of dpo over those of sft, for each part, and our tokens a second over TRL's best."""
    known = {}
    for values in results:
        if speed := values.get("tokens_per_second"):
            key = values["part"], values["name"]
            known[key] = max(known.get(key, values), values, key=lambda v: v["tokens_per_second"]) if speed else values
    found = []
    for (part, name), own in known.items():
        if name != "sft" and part != "trl" and (base := known.get((part, "sft"))):
            seconds = own["step_seconds"] / base["step_seconds"]
            with_reference = (own["step_seconds"] + own["reference_seconds"]) / base["step_seconds"]
            memory = own["reserved_bytes"] / base["reserved_bytes"] if base["reserved_bytes"] else None
            found.append(dict(ratio=f"{part}: {name} over sft", time=round(seconds, 3), memory=memory,
                              time_with_reference_of_one_epoch=round(with_reference, 3)))  # fmt: skip
    if ours := known.get(("qwen", "dpo")):
        for theirs in (values for (part, _), values in known.items() if part == "trl"):
            seconds = ours["step_seconds"] + ours["reference_seconds"]
            speed = ours["step_tokens"] / seconds / theirs["tokens_per_second"]
            found.append(dict(ratio="qwen: ours over trl, one epoch with its reference", speed=round(speed, 2)))
    return found


def lengths_of(part, steps, rehearse):
    """(pairs, 3) tokens of prompts, chosen and rejected responses."""
    draw, count = np.random.default_rng(0), steps * STEP_PAIRS[part] // (16 if rehearse else 1)
    if part == "small":
        prompts, chosen = draw_lengths(count, draw).T
        return np.stack([prompts, chosen, draw_lengths(count, draw)[:, 1]], axis=1).astype(np.int64)
    most = 1024 // (32 if rehearse else 1)
    totals = np.clip(draw.exponential(0.3 * most, (count, 2)), most // 16, most // 2).astype(np.int64)
    prompts = np.clip(draw.exponential(0.15 * most, count), most // 32, most // 2).astype(np.int64)
    return np.column_stack([prompts, totals])


@dataclass(frozen=True)
class Store:
    """A token store of random tokens with these lengths (rows, columns), the last ones being lengths of turns."""

    lengths: np.ndarray
    vocab_size: int
    values: dict
    num_turns: int = 0  # columns of turn lengths, each of one turn
    meta = dict(source=dict(max_seq_len=1024))

    def __len__(self):
        return len(self.lengths)

    def tokens(self, ids):
        draw, num_ids = np.random.default_rng(int(ids[0])), self.lengths.shape[1] - self.num_turns
        flat = [draw.integers(3, self.vocab_size, int(self.lengths[ids, c].sum())) for c in range(num_ids)]
        answers = self.lengths[ids, num_ids - self.num_turns : num_ids] if self.num_turns else []
        return (*flat, *(np.asarray(answers).T if self.num_turns else ()))


@dataclass(frozen=True)
class Run:
    """One measurement."""

    part: str
    name: str
    rehearse: bool

    @property
    def config(self):
        own = dict(
            bleu_pairs=0, warmup_steps=0, objective="pairs" if self.name == "sft" else "dpo", any_learn_rate=True
        )
        own |= dict(lora_rank=RANK) if self.part == "qwen" else dict(optimizer="adamw")
        return load_config("pretrain", own)

    @property
    def model_config(self):
        if self.part == "qwen":
            sizes = (
                (TINY_QWEN | dict(vocab_size=1000)) if self.rehearse else QWEN3_1_7B | dict(vocab_size=QWEN_VOCAB_SIZE)
            )
            return DecoderModelConfig(**sizes)
        return T5ModelConfig(
            **MODELS["tiny" if self.rehearse else "small"], vocab_size=1000 if self.rehearse else VOCAB_SIZE
        )

    def store(self, steps):
        """(Store, Objective) of the pairs of so many steps, or of both responses of each as examples."""
        lengths, is_decoder = lengths_of(self.part, steps, self.rehearse), self.part == "qwen"
        one, turns = np.ones(len(lengths), np.int64), int(is_decoder)
        if self.name == "sft":
            rows = np.concatenate([lengths[:, [0, 1]], lengths[:, [0, 2]]])
            order = np.arange(len(rows)).reshape(2, -1).T.ravel()  # both of a pair are neighbours
            rows = np.column_stack([rows, np.ones((len(rows), turns), np.int64)])[order]
            store = Store(rows, self.model_config.vocab_size, dict(target_tokens=rows[:, 1].astype(np.float32)), turns)
            return store, Dialogues("", 1024) if is_decoder else Pairs()
        rows = np.column_stack([lengths, one, one]) if is_decoder else lengths
        form = DialogueForm("") if is_decoder else PairForm(shares_source=self.name != "repeated")
        objective = Preferences(form, PreferenceLoss("sigmoid", 0.1))
        return Store(rows, self.model_config.vocab_size, {}, 2 * turns), objective

    def measure(self):
        """Yield the figures of `train_steps`, cut as the plan cuts a step."""
        setting = Setting(self.config, self.model_config, self.rehearse, 1, 1)
        warm, timed = (1, 2) if self.rehearse else (RECORDING + WARM, TIMED)
        store, objective = self.store(warm + timed)
        step, kernels = -(-len(store) // (warm + timed)), not self.rehearse
        _, usable = set_memory_limit(setting.device, 0.0)
        spec = make_spec(self.config, self.model_config, setting.dtype, setting.device.type, launch_tokens_here())
        examples = Examples(store, objective, family_of(self.model_config), 0, self.config.seed, kernels)
        examples = _with_zeros(examples)
        plan = choose_plan(plan_options(self.config), Estimate(spec, examples.histogram, step), usable, None)
        model, ranks = setting.model(), Ranks(0, 1, 0, setting.device, "none", None)
        optimizer = make_optimizer(model, self.config)
        dry_run_update(ranks, model, optimizer)
        loader = Loader(ranks, examples, schedule_of(self.config, len(store), step))
        context = StepContext(ranks, model, optimizer, loader, self.config)
        reset_peak(setting.device)
        tokens = started = 0
        for number, result in enumerate(train_steps(context, Position(plan))):
            tokens += result.tokens if number >= warm else 0
            started = _now(setting.device) if number == warm - 1 else started
        seconds = (_now(setting.device) - started) / timed
        own = lengths_of(self.part, warm + timed, self.rehearse)
        step_tokens = float((2 * own[:, 0] + own[:, 1] + own[:, 2]).sum()) / (warm + timed)  # as sft has them
        yield dict(
            step_seconds=seconds, tokens_per_second=step_tokens / seconds, step_tokens=step_tokens,
            read_tokens=tokens / timed, reserved_bytes=peak_memory(setting.device)[1] or 0,
            micro_batch_tokens=plan.micro_batch_tokens, recomputed_blocks=plan.gradient_checkpointing,
            recorded=plan.graphs, predicted_bytes=plan.predicted_peak_bytes,
            reference_seconds=self._reference_seconds(model, examples, plan, step, setting.device),
        )  # fmt: skip

    def _reference_seconds(self, model, examples, plan, step, device):
        """Seconds for the reference of a step's pairs; 0 for an objective without one."""
        if not examples.objective.derived:
            return 0.0
        from model.data.packing import cut

        count, started = min(4 * step, len(examples)), 0.0
        with evaluating(model):
            for again in (False, True):
                started = _now(device) if again else started
                for ids in cut(np.arange(count), examples.lengths(np.arange(count), EPOCH), plan.micro_batch_tokens):
                    batch = examples.batch(ids, EPOCH).to(device)
                    examples.objective.derive(model, batch, plan.chunk_tokens)
        return (_now(device) - started) * step / count


def _with_zeros(examples):
    return with_zeros(examples) if examples.objective.derived else examples


def _now(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def time_trl(options):
    """Yield the figures of TRL's DPOTrainer for each of its settings."""
    if options.trl:
        sys.path.insert(0, options.trl)
    for checkpointing in (False, True):
        for batch in BATCHES:
            release_memory()
            try:
                values = _trl_steps(batch, checkpointing, options)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                values = dict(problem="out of memory")
            yield dict(batch=batch, checkpointing=checkpointing) | values


def _trl_steps(batch, checkpointing, options):
    import peft
    from datasets import Dataset
    from transformers import Qwen3Config, Qwen3ForCausalLM, TrainerCallback
    from trl import DPOConfig, DPOTrainer

    rehearse, device = options.rehearse, torch.device("cpu" if options.rehearse else "cuda:0")
    warm, timed, step = (1, 1, 2) if rehearse else (WARM, TIMED, STEP_PAIRS["qwen"])
    batch = min(batch, step)
    lengths = lengths_of("qwen", 4 * (warm + timed), rehearse)[: (warm + timed) * step]
    sizes = Run("qwen", "dpo", rehearse).model_config
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size", "num_attention_heads",
             "num_key_value_heads", "head_dim", "tie_word_embeddings")  # fmt: skip
    known = {name: value for name in names if (value := getattr(sizes, name, None)) is not None}
    with device:
        model = Qwen3ForCausalLM(Qwen3Config(**known)).to(torch.float32 if rehearse else torch.bfloat16)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    lora = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=targets, task_type="CAUSAL_LM")
    draw = np.random.default_rng(0)
    columns = ("prompt_ids", "chosen_ids", "rejected_ids")
    rows = [
        {n: draw.integers(3, sizes.vocab_size, k).tolist() for n, k in zip(columns, own, strict=True)}
        for own in lengths
    ]

    class Encoded(DPOTrainer):
        """Its rows are ids already."""

        def _prepare_dataset(self, dataset, *arguments, **named):
            return dataset

    class Clock(TrainerCallback):
        started = ended = 0.0

        def on_step_end(self, arguments, state, control, **named):
            if state.global_step == warm:
                self.started = _now(device)
            self.ended = _now(device)

    clock, tokenizer = Clock(), _tokenizer(Path(options.output_dir) / "tokenizer")
    arguments = DPOConfig(
        output_dir=options.output_dir, per_device_train_batch_size=batch, gradient_accumulation_steps=step // batch,
        max_steps=warm + timed, gradient_checkpointing=checkpointing, bf16=not rehearse, use_cpu=rehearse, beta=0.1,
        loss_type=["sigmoid", "sft"], report_to=[], save_strategy="no", logging_steps=1000, max_length=None,
        remove_unused_columns=False, learning_rate=1e-4, warmup_steps=0, disable_tqdm=True,
    )  # fmt: skip
    trainer = Encoded(model, args=arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer,
                      peft_config=lora, callbacks=[clock])  # fmt: skip
    reset_peak(device)
    trainer.train()
    step_tokens = float((2 * lengths[:, 0] + lengths[:, 1] + lengths[:, 2]).sum()) / (warm + timed)
    seconds = (clock.ended - clock.started) / timed
    return dict(step_seconds=seconds, tokens_per_second=step_tokens / seconds, step_tokens=step_tokens,
                reserved_bytes=peak_memory(device)[1] or 0)  # fmt: skip


def _tokenizer(folder):
    """A tokenizer that TRL's trainer asks for, and that no row needs."""
    from transformers import PreTrainedTokenizerFast

    folder.mkdir(parents=True, exist_ok=True)
    make_qwen_tokenizer(folder)
    names = dict(pad_token="<|endoftext|>", eos_token="<|im_end|>")
    return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **names)


if __name__ == "__main__":
    sys.exit(main())
