"""Every option of a run, in flat frozen dataclasses. Standard library only.

A preset holds only its differences from the defaults, and the command line only the differences from the preset.
`load_config` (model/commands/option_values.py) uses every value as it was given, or raises ValueError.
"""

from dataclasses import dataclass, fields, replace

MAX_WIDTH, MAX_LAYERS, MAX_VOCAB_SIZE = 65_536, 256, 1 << 20  # a file with more is taken for damaged
MAX_JSON_BYTES = 1 << 20  # of a model's JSON file
MAX_INT, MAX_SEED = 2**31 - 1, 2**63 - 1  # of the whole-number options

DEFAULT_FAMILY = "t5"
# what MiniMind's decoders of 64 and 26 M (with its vocabulary of 6,400) share, as Qwen3
MINIMIND = dict(family="qwen3", num_hidden_layers=8, num_attention_heads=8, tie_word_embeddings=True)
MODELS = {
    "tiny": dict(d_model=128, d_ff=512, num_heads=2, d_kv=64, num_layers=2, num_decoder_layers=2),
    "small": dict(d_model=512, d_ff=2048, num_heads=8, d_kv=64, num_layers=6, num_decoder_layers=6),
    "chatlm": dict(d_model=768, d_ff=3072, num_heads=12, d_kv=64, num_layers=10, num_decoder_layers=10),
    "mini": MINIMIND | dict(hidden_size=768, intermediate_size=2432, num_key_value_heads=4),
    "mini_26m": MINIMIND | dict(hidden_size=512, intermediate_size=1408, num_key_value_heads=2),
}


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Options of one training run. Each field is a command-line option, --name=value; a step is an optimizer step."""

    # Data
    train_file: str = "data/pretrain_train.parquet"  # files, folders, datasets: FILE,FOLDER,NAME[SPLIT],FILE:0.5,FILE*2
    validation_file: str = "data/pretrain_valid.parquet"  # best/ is the best model on it; empty: no evaluation
    test_file: str = ""  # for the command test; empty: validation_file
    choices_file: str = ""  # for the command test: a csv file or folder of C-Eval, CMMLU or MMLU, in place of test_file
    num_shots: int = 0  # examples of its dev file before each question of choices_file; published results have 5
    prompt_column: str = ""  # empty: found by name
    response_column: str = ""  # empty: found by name
    learn_empty_thoughts: bool = False  # learn a thought without text, too, where a chat template writes one
    single_turn: bool = False  # ask each question of a conversation by itself, without system text and earlier turns
    prompt_prefix: str = ""  # a task's words before each question, also in chat and server
    tokenizer_dir: str = ""  # empty: the checkpoint's when fine-tuning, else model_save/tokenizer
    max_seq_len: int = 256  # most tokens of a prompt and of a response, or of a whole dialogue for a Qwen, EOS included
    objective: str = "pairs"  # what is learnt: pairs; of text: text (a decoder), span (a T5), prefix; dpo, orpo, simpo
    mix: str = ""  # in place of train_file and objective: files with an objective each, span:FILE*0.5,pairs:FILE
    span_density: float = 0.15  # span: share of a text's tokens that is taken out
    span_mean: float = 3.0  # span: tokens of a gap, on average
    # Preferences
    dpo_loss: str = "sigmoid"  # dpo: sigmoid, ipo
    beta: float = 0.0  # dpo, orpo, simpo: a response's reward is its score times this; 0: the objective's default
    gamma: float = 1.0  # simpo: the reward by which the chosen response should be ahead
    normalize_length: bool = False  # dpo: scores are a mean over tokens, as they always are with ipo, orpo and simpo
    sft_weight: float = 1.0  # dpo, orpo, simpo: weight of the cross-entropy of the chosen responses; 0: without it
    rejected_loops_weight: float = 0.0  # weight of the unlikelihood of what rejected responses repeat; 0: without it
    # Model
    model: str = "small"  # tiny, small, chatlm (T5), mini, mini_26m (decoders), or a JSON file of sizes
    finetune_from_ckp_file: str = ""  # Hugging Face or run directory, or a .bin state dict; empty: from scratch
    trainable: str = "all"  # weights that are trained: all, decoder
    dropout: float = -1.0  # probability; -1: by the number of pairs and epochs, of a T5 from scratch
    # Adapters
    lora_rank: int = 0  # train a LoRA adapter of this rank and freeze all other weights; 0: train the weights
    lora_alpha: float = 0.0  # what the adapter gives is scaled by alpha / rank; 0: twice the rank
    lora_targets: str = ""  # linear layers that get an adapter, for example q,v; empty: all
    lora_dropout: float = 0.0  # probability, of an adapter's input
    use_rslora: bool = False  # scale by alpha / sqrt(rank)
    lora_init: str = "uniform"  # an adapter's A is drawn uniform or gaussian, as PEFT draws it; B is zero
    base_precision: str = "auto"  # matrices of the frozen weights: auto (in the compute dtype), nf4 (4 bits a number)
    # Optimization
    epochs: int = 6  # passes over train_file
    max_steps: int = 0  # steps of the run, in place of epochs; 0: by epochs
    batch_size_per_gpu: int = 32  # pairs
    gradient_accumulation_steps: int = 2  # multiplies the pairs of a step
    global_batch_size: int = 0  # pairs of a step over all ranks; 0: batch x ranks x accumulation
    optimizer: str = "auto"  # auto (muon from scratch and for weights that it trained, else adamw), or its name
    learn_rate: float = 0.0  # peak; 0: the optimizer's default
    any_learn_rate: bool = False  # accept a learn_rate outside the optimizer's range
    warmup_steps: int = -1  # steps; -1: a tenth of the run, at most 1000
    warmup_ratio: float = -1.0  # the warm-up's share of the run, in place of warmup_steps; -1: by warmup_steps
    lr_schedule: str = "cosine"  # cosine, wsd (constant, then down to zero over the last fifth)
    weight_decay: float = 0.0  # each step shrinks the layers' matrices by their own learning rate times this
    average: float = 0.0  # also keep an average of the weights, so old on average, as a share of the steps so far
    max_grad_norm: float = 1.0  # 0: no clipping
    z_loss: float = 0.0  # weight of the squared log-normaliser in the loss
    label_smoothing: float = 0.0  # share of a target's probability that is spread over the vocabulary
    against_loops: str = "none"  # learn not to repeat oneself: none, unlikelihood, scalegrad, contrastive
    loops_weight: float = 1.0  # of against_loops
    loops_ngram: int = 1  # against_loops: 1: what stands in the answer; 2: what writes a pair of its tokens again
    teacher: str = ""  # models of the same tokenizer whose predictions are learnt too: DIR,DIR; several are averaged
    distill_weight: float = 0.5  # share of the loss that compares with the teachers; the rest is that of the targets
    distill_temperature: float = 1.0  # by which the logits of teachers and student are divided to compare them
    spike_guard: float = 0.0  # skip steps whose gradient norm exceeds the median by this factor; 0: off
    seed: int = 23333  # of the initial weights, the order of pairs and dropout
    # Memory and speed
    mixed_precision: str = "auto"  # auto (bf16 where the GPU has it), bf16, no
    gradient_checkpointing: str = "auto"  # auto (as many blocks as memory needs), True (all), False
    activation_offload: str = "auto"  # inputs of recomputed blocks to host memory: auto (as needed), True, False
    compile: str = "auto"  # replay steps as CUDA graphs: auto (on GPUs, in runs long enough to gain), True, False
    micro_batch_tokens: int = 0  # tokens of prompts and responses in one forward pass; 0: planned
    gpu_memory_limit_gb: float = 0.0  # GiB; 0: all that is free
    reduce_dtype: str = "float32"  # in which ranks send gradients: float32, or bf16 (half of the bytes, for slow links)
    share_state: str = "auto"  # ranks share optimizer state and masters: auto (where a plan needs it), True, False
    master_dtype: str = "float32"  # of AdamW's weights and gradients: float32, bf16 (random rounding), auto (as needed)
    offload: str = "none"  # to host memory: none, optimizer (AdamW's masters and state), auto (as needed)
    deterministic: bool = False  # bit-equal results on the same hardware and number of ranks
    # Run
    output_dir: str = "model_save/pretrain"  # the run directory
    logging_steps: int = 20  # steps between two log lines
    eval_steps: int = 0  # steps between evaluations beside those at the end of each epoch; 0: only those
    best_metric: str = "loss"  # what best/ is best in: loss, bleu, chrf; accuracy (dpo, orpo, simpo)
    patience: int = 3  # evaluations without a better one until a warning says so; 0: no warning
    early_stop: int = 0  # evaluations without a better one until the run ends, finished; 0: never
    save_steps: int = 500  # steps between two checkpoints
    save_seconds: int = 600  # a checkpoint is written at least this often
    keep_latest_n_ckp: int = 2  # number of checkpoints kept
    bleu_pairs: int = 100  # validation pairs that BLEU and chrF are computed on; 0: none
    max_new_tokens: int = 128  # of one generated answer, at most
    no_repeat_ngram_size: int = 0  # answers repeat no run of so many of their own tokens; 0: they may
    temperature: float = -1.0  # of the exported models' answers, 0: always the likeliest; -1: chosen at the end
    top_k: int = 0  # with a temperature: draw from so many of the likeliest tokens; 0: from all
    top_p: float = 1.0  # with a temperature: draw from the likeliest tokens that together have this probability
    min_p: float = 0.0  # with a temperature: draw from tokens at least this times as likely as the likeliest
    repetition_penalty: float = 0.0  # above 1: tokens that an answer has become less likely; 0: chosen at the end
    log_sample_ids: bool = False  # write the example ids of each step to samples_rank<r>.jsonl
    backend: str = "auto"  # auto (NCCL on GPUs, Gloo on CPUs), nccl, gloo
    screen: str = "auto"  # a full screen while training: auto (on a terminal), on, off (plain lines)
    plots: bool = True  # draw loss, speed, memory, lengths and learning rate after evaluations and at the end
    tracker: str = ""  # who else gets the journal's numbers: tensorboard, wandb, or both as tensorboard,wandb
    ddp_timeout_s: int = 600  # seconds that one rank may keep the others waiting before the run ends

    def __post_init__(self):
        problems = [*problems_of_values(self), *_contradictions(self)]
        if problems:
            raise ValueError("cannot run with this configuration:\n  " + "\n  ".join(problems))


MINIMUM = dict(
    epochs=1, batch_size_per_gpu=1, gradient_accumulation_steps=1, global_batch_size=0, max_seq_len=8, seed=0,
    warmup_steps=-1, weight_decay=0, max_grad_norm=0, z_loss=0, micro_batch_tokens=0, gpu_memory_limit_gb=0,
    logging_steps=1, eval_steps=0, save_steps=1, save_seconds=1, keep_latest_n_ckp=2, bleu_pairs=0, max_new_tokens=1,
    no_repeat_ngram_size=0, top_k=0, ddp_timeout_s=30, spike_guard=0, lora_rank=0, lora_alpha=0, max_steps=0,
    patience=0, early_stop=0, loops_weight=0, loops_ngram=1, num_shots=0, beta=0, gamma=0, sft_weight=0,
    rejected_loops_weight=0,
)  # fmt: skip
CHOICES = dict(
    optimizer=("auto", "muon", "adamw_rms", "adamw", "adafactor"),
    against_loops=("none", "unlikelihood", "scalegrad", "contrastive"),
    lr_schedule=("cosine", "wsd"),
    mixed_precision=("auto", "bf16", "no"),
    gradient_checkpointing=("auto", "True", "False"),
    activation_offload=("auto", "True", "False"),
    compile=("auto", "True", "False"),
    share_state=("auto", "True", "False"),
    master_dtype=("float32", "bf16", "auto"),
    offload=("none", "optimizer", "auto"),
    trainable=("all", "decoder"),
    base_precision=("auto", "nf4"),
    lora_init=("uniform", "gaussian"),
    reduce_dtype=("float32", "bf16"),
    backend=("auto", "nccl", "gloo"),
    screen=("auto", "on", "off"),
    best_metric=("loss", "bleu", "chrf", "accuracy"),
    dpo_loss=("sigmoid", "ipo"),
)


# Default peak from scratch, default peak for fine-tuning, lowest and highest rate accepted. Measured
# (bench/results/optimizers.md) with the model small, from scratch on 189,202 pairs, fine-tuned on 58,668.
LEARN_RATES = dict(
    muon=(3e-2, 1.5e-2, 1e-3, 1e-1),  # 4e-2 is hardly better, 8e-2 far worse; fine-tuning: 2e-3 to 3e-2 tried
    adamw_rms=(2e-2, 5e-3, 1e-3, 1e-1),  # 3e-2 is hardly better, 5e-3 and 1e-2 far worse; fine-tuning: 2e-3, 5e-3 tried
    adafactor=(2e-2, 5e-3, 1e-3, 1e-1),  # 1e-2 to 4e-2 tried; T5 used 1e-2, fine-tuning 1e-3 (arXiv 1910.10683)
    adamw=(3e-4, 1e-3, 1e-6, 5e-3),  # 1e-3 is far worse; fine-tuning: 3e-5 to 3e-3 tried (bench/results)
)
FINE_TUNED_WIDTH = 512  # of a network that AdamW fine-tunes at that rate; it falls with a greater width
# The same for adapters, whose B starts at zero, so that a rate relative to it would leave it there: torch's AdamW takes
# its rate as it is. Ten times that of all weights (Schulman et al. 2025, LoRA Without Regret), whatever the rank.
SCRATCH_OPTIMIZER, LORA_OPTIMIZER, LORA_LEARN_RATES = "muon", "adamw", (1e-3, 1e-3, 1e-5, 5e-2)
UNSHAREABLE = ("adamw_rms", "adafactor")  # optimizers whose state ranks cannot share
OPTIONS_WITH = dict(teacher=("distill_weight", "distill_temperature"), against_loops=("loops_weight", "loops_ngram"))
# Of preferences: the share of a fine-tuning rate that is the default (the papers and LLaMA-Factory take 1/50 to 1/5 of
# theirs), and how far down and up its range moves.
PREFERENCE_RATES, LOWER, UPPER = dict(dpo=0.05, orpo=0.2, simpo=0.05), 0.01, 0.2
BETAS = dict(dpo=0.1, orpo=0.1, simpo=2.0)  # of TRL's DPO and ORPO; of SimPO's authors
LORA_OPTIONS = ("lora_alpha", "lora_targets", "lora_dropout", "use_rslora", "lora_init")
MAX_LORA_RANK = 4096
MAX_DEFAULT_WARMUP_STEPS = 1000
TRACKERS = ("tensorboard", "wandb")


def _outside_tables(config):
    """Yield a message for each value outside MINIMUM, the whole numbers and CHOICES."""
    for name, least in MINIMUM.items():
        if getattr(config, name) < least:
            yield f"{name}={getattr(config, name)}: must be at least {least}"
    for f in fields(TrainConfig):
        most = MAX_SEED if f.name == "seed" else MAX_INT
        if f.type is int and getattr(config, f.name) > most:
            yield f"{f.name}={getattr(config, f.name)}: must be at most {most}"
    for name, choices in CHOICES.items():
        if getattr(config, name) not in choices:
            why = "; fp16 is refused because T5 diverges in it" if getattr(config, name) == "fp16" else ""
            yield f"{name}={getattr(config, name)!r}: choose one of {', '.join(choices)}{why}"


def problems_of_values(config):
    """Yield a message for each value that a run cannot have, whatever the others are."""
    yield from _outside_tables(config)
    if not 0 <= config.learn_rate <= 1:
        yield f"learn_rate={config.learn_rate}: must be above 0 and at most 1, or 0 for the optimizer's default"
    for name in ("dropout", "lora_dropout", "label_smoothing"):
        by_data = name == "dropout" and config.dropout == -1
        if not (by_data or 0 <= getattr(config, name) < 1):
            yield f"{name}={getattr(config, name)}: must be in [0, 1){', or -1' if name == 'dropout' else ''}"
    if not 0 <= config.average <= 0.5:
        yield f"average={config.average}: must be at most 0.5 (the mean of all steps), or 0 for no average"
    if config.lora_rank > MAX_LORA_RANK:
        yield f"lora_rank={config.lora_rank}: must be at most {MAX_LORA_RANK}"
    if config.warmup_ratio != -1 and not 0 <= config.warmup_ratio < 1:
        yield f"warmup_ratio={config.warmup_ratio}: must be in [0, 1), or -1 for warmup_steps"
    if not 0 < config.distill_weight <= 1:
        yield f"distill_weight={config.distill_weight}: must be above 0 and at most 1"
    if not 0.1 <= config.distill_temperature <= 100:
        yield f"distill_temperature={config.distill_temperature}: must be from 0.1 to 100"
    if config.loops_ngram > 8:
        yield f"loops_ngram={config.loops_ngram}: must be at most 8"
    if 0 < config.spike_guard <= 1:
        yield f"spike_guard={config.spike_guard}: must be above 1 (half of all norms exceed the median), or 0"
    if config.max_seq_len > 65_535:
        yield f"max_seq_len={config.max_seq_len}: must be at most 65535"
    if config.model not in MODELS and not config.model.endswith(".json"):
        yield f"model={config.model!r}: choose one of {', '.join(MODELS)}, or give a .json file"
    if bad := [name for name in config.tracker.split(",") if config.tracker and name not in TRACKERS]:
        yield f"tracker={config.tracker!r}: {bad[0]!r} is none of {', '.join(TRACKERS)}; both are tensorboard,wandb"
    for name in ("teacher", "lora_targets"):
        if (text := getattr(config, name)) and not text.strip(", "):
            yield f"{name}={text!r}: names nothing: leave it out, or type names with commas between them"
    if not config.output_dir:
        yield "output_dir is empty: give a directory"
    yield from _answer_problems(config)


def _answer_problems(config):
    """Yield a message for each value that says nothing of how to answer."""
    if config.no_repeat_ngram_size > 16:
        yield f"no_repeat_ngram_size={config.no_repeat_ngram_size}: must be at most 16"
    if not 0 <= config.temperature <= 100 and config.temperature != -1:
        yield f"temperature={config.temperature}: must be from 0 to 100, or -1 to have it chosen on the validation file"
    if not 0 < config.top_p <= 1:
        yield f"top_p={config.top_p}: must be above 0 and at most 1"
    if not 0 <= config.min_p < 1:
        yield f"min_p={config.min_p}: must be from 0 to below 1"
    if config.repetition_penalty and not 0.01 <= config.repetition_penalty <= 100:
        yield f"repetition_penalty={config.repetition_penalty}: must be from 0.01 to 100, or 0 to have it chosen"


def _unshareable(config):
    """Yield a message for each value that ranks cannot share the state of."""
    if config.optimizer in UNSHAREABLE:
        yield (
            f"share_state=True: ranks share the state of adamw or muon, not that of {config.optimizer}: leave one of "
            "the two out"
        )
    if config.average:
        yield f"share_state=True: no rank has whole weights to average (average={config.average}): leave one out"


def _not_rounded(config):
    """Yield a message for each value with which weights cannot be updated in bf16 alone."""
    if config.optimizer not in ("auto", "adamw"):
        yield f"master_dtype=bf16: adamw rounds to bf16, {config.optimizer} does not: type --optimizer=adamw too"
    if config.mixed_precision == "no":
        yield "master_dtype=bf16 contradicts mixed_precision=no: leave one of them out"
    if config.lora_rank:
        yield f"master_dtype=bf16: an adapter (lora_rank={config.lora_rank}) has few weights: leave it out"
    if config.average:
        yield f"master_dtype=bf16: bf16 is too coarse for an average of the weights: leave average={config.average} out"


def _not_offloaded(config):
    """Yield a message for each value with which masters and state cannot be in host memory."""
    if config.optimizer not in ("auto", "adamw"):
        yield f"offload=optimizer: it holds the state of adamw, not of {config.optimizer}: type --optimizer=adamw too"
    if config.share_state == "False":
        yield "offload=optimizer: ranks share what they offload: leave share_state=False out"
    if config.average:
        yield f"offload=optimizer: the device holds no weights to average (average={config.average}): leave one out"


def _adapter_problems(config):
    """Yield a message for each value that needs an adapter, or contradicts one."""
    for name in LORA_OPTIONS:
        if getattr(config, name) != getattr(TrainConfig, name) and not config.lora_rank:
            yield f"{name}={getattr(config, name)}: belongs to an adapter, so type its rank too, --lora_rank=16"
    if config.base_precision != "auto" and not config.lora_rank:
        yield f"base_precision={config.base_precision}: only frozen weights can be held so: type --lora_rank=16 too"
    if config.lora_rank and config.trainable != "all":
        yield f"trainable={config.trainable}: with --lora_rank only the adapter is trained: leave --trainable out"


def _contradictions(config):
    """Yield a message for each pair of values that cannot both hold."""
    yield from _adapter_problems(config)
    if config.share_state == "True":
        yield from _unshareable(config)
    if config.master_dtype == "bf16":
        yield from _not_rounded(config)
    if config.offload == "optimizer":
        yield from _not_offloaded(config)
    if config.warmup_ratio >= 0 and config.warmup_steps >= 0:
        yield f"warmup_ratio={config.warmup_ratio} contradicts warmup_steps={config.warmup_steps}: -1 turns one off"
    for owner, options in OPTIONS_WITH.items():
        for name in options:
            is_off = getattr(config, owner) == getattr(TrainConfig, owner)
            if is_off and getattr(config, name) != getattr(TrainConfig, name):
                yield f"{name}={getattr(config, name)}: only {owner} uses it: type --{owner} too, or leave it out"
    if config.activation_offload == "True":
        if config.gradient_checkpointing == "False":
            yield "activation_offload=True moves inputs of recomputed blocks: leave gradient_checkpointing=False out"
        if config.compile == "True":
            yield "activation_offload=True: steps that move inputs are not captured: leave compile=True out"
    if config.best_metric in ("bleu", "chrf") and not config.bleu_pairs:
        yield f"best_metric={config.best_metric} needs generated answers, and bleu_pairs=0: give bleu_pairs=100"
    for name in ("top_k", "top_p", "min_p"):
        if getattr(config, name) != getattr(TrainConfig, name) and config.temperature <= 0:
            yield f"{name}={getattr(config, name)} belongs to a temperature above 0: type --temperature=0.7 too"
    if not config.validation_file:
        for name in ("eval_steps", "early_stop", "average"):
            if getattr(config, name):
                yield f"{name}={getattr(config, name)}: validation_file is empty, so nothing is evaluated: give a file"


SFT = dict(
    finetune_from_ckp_file="model_save/pretrain/best", train_file="data/sft_train.parquet",
    validation_file="data/sft_valid.parquet", epochs=3, logging_steps=10,
)  # fmt: skip
PRESETS = {
    "pretrain": {},
    "pretrain_large": dict(output_dir="model_save/pretrain_large", model="chatlm", max_seq_len=192),
    "sft": SFT | dict(output_dir="model_save/sft", epochs=5, batch_size_per_gpu=20),
    "sft_small": SFT | dict(output_dir="model_save/sft_small", batch_size_per_gpu=1, gradient_accumulation_steps=8),
    "sft_fast": SFT | dict(output_dir="model_save/sft_fast", batch_size_per_gpu=16, save_steps=156),
}


def with_known_optimizer(config):
    """`config` with the optimizer that its options alone determine; auto where the model must be read first."""
    if config.optimizer == "auto" and (config.lora_rank or not config.finetune_from_ckp_file):
        return with_optimizer(config, LORA_OPTIMIZER if config.lora_rank else SCRATCH_OPTIMIZER)
    return config if config.optimizer == "auto" else with_optimizer(config, config.optimizer)


def with_optimizer(config, name):
    """`config` with this optimizer, and with its default learning rate if none is given."""
    config = replace(config, optimizer=name)
    return replace(config, learn_rate=config.learn_rate or default_learn_rate(config))


def default_learn_rate(config):
    """Peak learning rate that config's optimizer uses if none is given."""
    scratch, finetuning, *_ = rates_of(config)
    return finetuning if config.finetune_from_ckp_file else scratch


def rates_of(config):
    """Default peak from scratch and for fine-tuning, lowest and highest learning rate of config's optimizer."""
    is_adapter = config.lora_rank and config.optimizer == LORA_OPTIMIZER
    rates = LORA_LEARN_RATES if is_adapter else LEARN_RATES[config.optimizer]
    if config.objective not in PREFERENCE_RATES:
        return rates
    _, finetuning, lowest, highest = rates
    default = finetuning * PREFERENCE_RATES[config.objective]
    return default, default, lowest * LOWER, highest * UPPER
