"""TRL's DPOTrainer on the pairs of bench.preferences, which calls this: seconds, tokens and memory of a step."""

import sys
from pathlib import Path

import numpy as np
import torch

from bench.preference_pairs import RANK, STEP_PAIRS, TIMED, WARM, lengths_of, model_config_of, now
from model.runtime.device_memory import is_out_of_memory, peak_memory, release_memory, reset_peak
from tests.data.qwen_tokenizer import make_qwen_tokenizer

BATCHES = (8, 4, 2)


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
    from trl import DPOConfig, DPOTrainer

    rehearse, device = options.rehearse, torch.device("cpu" if options.rehearse else "cuda:0")
    warm, timed, step = (1, 1, 2) if rehearse else (WARM, TIMED, STEP_PAIRS["qwen"])
    batch = min(batch, step)
    lengths = lengths_of("qwen", 4 * (warm + timed), rehearse)[: (warm + timed) * step]
    sizes = model_config_of("qwen", rehearse)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    lora = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=targets, task_type="CAUSAL_LM")

    class Encoded(DPOTrainer):
        """Its rows are ids already."""

        def _prepare_dataset(self, dataset, *arguments, **named):
            return dataset

    clock = _clock(warm, device)
    arguments = DPOConfig(
        output_dir=options.output_dir, per_device_train_batch_size=batch, gradient_accumulation_steps=step // batch,
        max_steps=warm + timed, gradient_checkpointing=checkpointing, bf16=not rehearse, use_cpu=rehearse, beta=0.1,
        loss_type=["sigmoid", "sft"], report_to=[], save_strategy="no", logging_steps=1000, max_length=None,
        remove_unused_columns=False, learning_rate=1e-4, warmup_steps=0, disable_tqdm=True,
    )  # fmt: skip
    trainer = Encoded(
        _network(sizes, device), args=arguments, train_dataset=Dataset.from_list(_rows(lengths, sizes.vocab_size)),
        processing_class=_tokenizer(Path(options.output_dir) / "tokenizer"), peft_config=lora, callbacks=[clock],
    )  # fmt: skip
    reset_peak(device)
    trainer.train()
    step_tokens = float((2 * lengths[:, 0] + lengths[:, 1] + lengths[:, 2]).sum()) / (warm + timed)
    seconds = (clock.ended - clock.started) / timed
    return dict(step_seconds=seconds, tokens_per_second=step_tokens / seconds, step_tokens=step_tokens,
                reserved_bytes=peak_memory(device)[1] or 0)  # fmt: skip


def _network(sizes, device):
    """transformers' network of these sizes, with random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size", "num_attention_heads",
             "num_key_value_heads", "head_dim", "tie_word_embeddings")  # fmt: skip
    known = {name: value for name in names if (value := getattr(sizes, name, None)) is not None}
    with device:
        return Qwen3ForCausalLM(Qwen3Config(**known)).to(torch.float32 if device.type == "cpu" else torch.bfloat16)


def _rows(lengths, vocab_size):
    """Random ids of these lengths, as the rows of a dataset."""
    draw = np.random.default_rng(0)
    columns = ("prompt_ids", "chosen_ids", "rejected_ids")
    return [{n: draw.integers(3, vocab_size, k).tolist() for n, k in zip(columns, own, strict=True)} for own in lengths]


def _clock(warm, device):
    """A callback that holds the time after `warm` steps and after the last one."""
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        started = ended = 0.0

        def on_step_end(self, arguments, state, control, **named):
            if state.global_step == warm:
                self.started = now(device)
            self.ended = now(device)

    return Clock()


def _tokenizer(folder):
    """A tokenizer that TRL's trainer asks for, and that no row needs."""
    from transformers import PreTrainedTokenizerFast

    folder.mkdir(parents=True, exist_ok=True)
    make_qwen_tokenizer(folder)
    names = dict(pad_token="<|endoftext|>", eos_token="<|im_end|>")
    return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **names)
