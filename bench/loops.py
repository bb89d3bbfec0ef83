"""The training loops that bench.compare times: ours, transformers' Seq2SeqTrainer, a hand-tuned loop."""

import os
from dataclasses import asdict, replace
from itertools import cycle

import numpy as np
import torch
from datasets import Dataset
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration, TrainerCallback

from bench.corpus import VOCAB_SIZE, open_corpus
from bench.runs import prepare
from model.nn.registry import load_model_config
from model.runtime.device_memory import reset_peak
from model.runtime.distributed import start_ranks
from model.train.step import Position, train_steps

PAD_ID = 0
SHAPES = ((32, 128), (32, 256), (128, 256), (256, 256))  # padded tokens of (prompt, response)
PROMPT_CLASSES = (24, 48, 96)  # prompt lengths that separate the groups of Seq2SeqTrainer


def train_ours(cell, corpus, clock):
    """`train_steps` as train_low_mem.py runs it, with the options that a user would type."""
    os.chdir(corpus)
    ranks = start_ranks()
    run, plan = prepare(ranks, dict(
        model=cell["model"], batch_size_per_gpu=cell["pairs"], gradient_accumulation_steps=cell["rounds"],
        output_dir=f"runs/{cell['name'].replace('/', '_')}", **cell["options"],
    ))  # fmt: skip
    reset_peak(ranks.device)  # leaves out the peak of the memory probes
    for result in train_steps(run.context, Position(plan)):
        if clock.tick(len(result.ids), result.tokens):
            return dict(loss=float(result.loss), micro_batches=result.micro_batches, plan=asdict(result.plan))
    raise AssertionError("the corpus ended before the clock")


def hf_t5(name, attention):
    """transformers' T5 with the sizes of model `name`, random weights and no dropout."""
    model_config = replace(load_model_config(name), vocab_size=VOCAB_SIZE)
    ids = dict(pad_token_id=PAD_ID, eos_token_id=1, decoder_start_token_id=PAD_ID)
    kind = dict(feed_forward_proj="relu", tie_word_embeddings=True, use_cache=False, dropout_rate=0.0)
    config = T5Config(**asdict(model_config) | ids | kind)
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(config)
    model.set_attn_implementation(attention)
    return model


def pad(examples, shape=None):
    """Batch for transformers' T5, padded to `shape` (prompt, response) or to the longest example."""
    prompts, labels = ([np.asarray(e[side]) for e in examples] for side in ("input_ids", "labels"))
    widths = shape or (max(map(len, prompts)), max(map(len, labels)))
    input_ids, labels = (_fill(*side) for side in ((prompts, widths[0], PAD_ID), (labels, widths[1], -100)))
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    return dict(input_ids=input_ids, labels=labels, attention_mask=(torch.arange(widths[0]) < lengths[:, None]).long())


def _fill(rows, width, value):
    out = np.full((len(rows), width), value, dtype=np.int64)
    for line, row in zip(out, rows, strict=True):
        line[: len(row)] = row
    return torch.from_numpy(out)


def train_trainer(cell, corpus, clock):
    """Baseline A: Seq2SeqTrainer with the arguments that make it fast."""
    rows = trainer_rows(open_corpus(corpus))
    args = trainer_arguments(
        cell, os.path.join(corpus, "runs", "trainer"), max_steps=10**6, dataloader_drop_last=True,
        logging_strategy="no", save_strategy="no",
    )  # fmt: skip
    shape = SHAPES[-1] if cell["static"] else None
    trainer = TimedTrainer(
        hf_t5(cell["model"], cell["attention"]), args, train_dataset=rows,
        data_collator=lambda examples: pad(examples, shape),
    )  # fmt: skip
    trainer.add_callback(TickAtStepEnd(trainer, clock))
    trainer.train()
    return dict(loss=float(trainer.last_loss))


def trainer_rows(store):
    """A token store as a data set for Seq2SeqTrainer, with the column `length` that it groups by."""
    lengths = store.lengths.astype(np.int64)
    # Sorts by prompt class, then by response length: less padding than the longer side or the sum of both gives.
    groups = np.digitize(lengths[:, 0], PROMPT_CLASSES) * 1000 + lengths[:, 1]
    rows = dataset_of(store)
    return rows.add_column("length", groups.tolist()).with_format("numpy")


def dataset_of(store):
    """A token store as a Dataset under the names that transformers' models take."""
    rows = Dataset.from_file(str(store.directory / "ids.arrow"))
    return rows.rename_columns(dict(prompt_ids="input_ids", response_ids="labels"))


def trainer_arguments(cell, output_dir, **more):
    """The arguments that make Seq2SeqTrainer fast, with `cell`'s pairs per forward, and `more`."""
    on_cpu = not torch.cuda.is_available()
    return Seq2SeqTrainingArguments(
        output_dir=str(output_dir), per_device_train_batch_size=cell["pairs"],
        gradient_accumulation_steps=cell["rounds"], bf16=not on_cpu, use_cpu=on_cpu, optim="adamw_torch_fused",
        learning_rate=1e-4, torch_compile=cell["compile"],
        train_sampling_strategy="random" if cell["static"] else "group_by_length",
        dataloader_num_workers=0 if on_cpu else 4, remove_unused_columns=False, logging_nan_inf_filter=False,
        report_to="none", disable_tqdm=True, **more,
    )  # fmt: skip


class TimedTrainer(Seq2SeqTrainer):
    """Seq2SeqTrainer that counts real tokens on the device."""

    step_tokens = 0
    last_loss = None

    def training_step(self, model, inputs, num_items_in_batch=None):
        self.step_tokens = self.step_tokens + inputs["attention_mask"].sum() + (inputs["labels"] != -100).sum()
        self.last_loss = super().training_step(model, inputs, num_items_in_batch)
        return self.last_loss


class TickAtStepEnd(TrainerCallback):
    def __init__(self, trainer, clock):
        self.trainer, self.clock = trainer, clock

    def on_step_end(self, args, state, control, **parts):
        pairs = args.per_device_train_batch_size * args.gradient_accumulation_steps
        control.should_training_stop = self.clock.tick(pairs, self.trainer.step_tokens)
        self.trainer.step_tokens = 0


def train_by_hand(cell, corpus, clock):
    """Baseline B: HF T5 with SDPA, compiled for one padded shape, with large batches already on the device."""
    device = clock.device
    shape, batch_size = tuple(cell["shape"]), cell["pairs"]
    store = open_corpus(corpus)
    members = np.flatnonzero(smallest_shape(store.lengths) == SHAPES.index(shape))
    ids = np.resize(members, 8 * batch_size).reshape(8, batch_size)  # repeats pairs if there are too few
    rows = dataset_of(store).with_format("numpy")
    batches = [pad([rows[int(i)] for i in part], shape) for part in ids]
    batches = [{name: tensor.to(device) for name, tensor in batch.items()} for batch in batches]
    counts = [int(store.lengths[part].sum(dtype=np.int64)) for part in ids]
    model = hf_t5(cell["model"], "sdpa").to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    compiled = torch.compile(model, dynamic=False) if cell["compile"] else model
    for batch, tokens in cycle(zip(batches, counts, strict=True)):
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = compiled(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if clock.tick(batch_size, tokens):
            return dict(loss=loss.item())


def smallest_shape(lengths):
    """Index in SHAPES of the smallest shape that holds each pair."""
    fits = [(lengths[:, 0] <= prompt) & (lengths[:, 1] <= response) for prompt, response in SHAPES]
    return np.argmax(fits, axis=0)
