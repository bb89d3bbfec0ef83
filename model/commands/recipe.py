"""What a run is: resolved from its options and from what they meet, the same for train, plan, test and doctor."""

from dataclasses import dataclass, replace

import torch

from config import UNSHAREABLE, TrainConfig
from model.commands.machine import Machine, compute_dtype
from model.commands.objective import objective_on, objectives_for
from model.commands.run_files import judged_objectives
from model.commands.run_length import check_warmup, global_batch, run_pairs, run_passes, warmup_pairs
from model.commands.settled import settled, with_dropout, with_rate
from model.commands.teachers import taught
from model.generate.sampling import Sampling
from model.memory.estimate import Answers, Estimate
from model.memory.plan import NothingFits, PlanOptions, choose_plan
from model.nn.attention import has_kernels
from model.nn.memory_spec import MemorySpec, OwnPart, part_numbers
from model.nn.registry import family_of
from model.train.adamw import ROUNDED_TOGETHER
from model.train.host_adamw import HostAdamW
from model.train.loader import Schedule
from model.train.lr_schedule import LearnRate
from model.train.objectives.protocol import Objective
from model.train.optim import OPTIMIZERS, UpdateOptions
from model.train.reduction import buffer_bytes

UNMOVED = dict(offload="none", master_dtype="float32")  # what auto becomes where nothing is needed
CPU_ANSWERS = 128  # at a time on a CPU: 1.2 times as fast as 64, in twice the memory


@dataclass(frozen=True)
class Rules:
    """When a run is evaluated, and what follows."""

    eval_steps: int  # steps between evaluations beside those at the end of each epoch; 0: only those
    best_metric: str  # loss, bleu, chrf
    patience: int  # evaluations without a better one until a warning; 0: no warning
    early_stop: int  # evaluations without a better one until the run ends; 0: never
    draws_plots: bool  # after an evaluation


@dataclass(frozen=True)
class Recipe:
    """All that is decided of a run before it computes."""

    config: TrainConfig  # the options as the run uses them and as its config.json records them
    why_optimizer: str  # as `choose_optimizer` says
    why_dropout: str  # as `with_dropout` says
    machine: Machine
    objectives: dict[str, Objective]  # those that the options name
    spec: MemorySpec  # network, dtype, kernels, adapter, bytes of the optimizer
    dtype: torch.dtype  # in which the network computes
    global_batch: int  # pairs of a step over all ranks
    schedule: Schedule | None  # None: the number of pairs is unknown
    num_answers: int  # that an evaluation generates; 0: none
    answers: Answers  # of a rank's evaluation
    sampling: Sampling  # of answers in evaluations
    decoding: Sampling  # of answers of the exported models, unless it is chosen on the validation questions
    update: UpdateOptions
    plan: PlanOptions
    rules: Rules
    teachers: tuple = ()  # sha256 of the weights of each

    @property
    def model_config(self):
        return self.spec.model_config

    @property
    def family(self):
        return self.spec.family

    @property
    def share_pairs(self):
        """Most pairs of a step that one rank has."""
        return -(-self.global_batch // self.machine.num_processes)

    @property
    def num_steps(self):
        """Steps of the run if each had a whole batch."""
        return self.schedule.total_pairs / self.global_batch

    @property
    def held(self):
        """The options, by name, of where masters, state and inputs of recomputed blocks are held."""
        return {name: getattr(self.config, name) for name in ("share_state", "activation_offload", *UNMOVED)}

    @property
    def warmup_steps(self):
        return self.schedule.learn_rate.warmup_pairs / self.global_batch

    def objective_on(self, files):
        """The objective of these DataFiles."""
        return objective_on(self.objectives, files)

    def estimate(self, lengths):
        """The Estimate of this run's memory on examples of these Lengths."""
        return Estimate(self.spec, lengths, self.share_pairs, self.answers)


def resolve(config, typed, machine, origin, epoch_pairs=None):
    """The Recipe of a run with the options `config` on a Machine, from an Origin; pure, so equal facts give equal ones.

    `typed` holds the names of the options on the command line. `epoch_pairs`: pairs of an epoch; None: not known yet,
    then there is no schedule. Raises ValueError for options that contradict each other or the facts.
    """
    config, why = settled(config, typed, origin)
    if config.offload == "optimizer" and machine.num_processes > 1:
        config = replace(config, share_state="True")  # the host holds each part once
    dtype = compute_dtype(config.mixed_precision, machine.native_bf16)
    lora = origin.adapter and origin.adapter.lora
    objectives = objectives_for(config, origin.model_config, origin.tokenizer)
    num_answers = answers_asked(config, objectives)
    batch = global_batch(config, machine.num_processes, typed)
    first_batch = origin.found.state.first_batch if origin.found else batch
    num_steps = epoch_pairs and run_pairs(config, epoch_pairs, first_batch) / first_batch
    config = with_rate(config, typed, origin, num_steps)
    config, why_dropout = with_dropout(config, origin, epoch_pairs or 0, run_passes(config, epoch_pairs, first_batch))
    return Recipe(
        config=config,
        why_optimizer=why,
        why_dropout=why_dropout,
        machine=machine,
        objectives=objectives,
        spec=taught(memory_spec(config, origin.model_config, dtype, machine, lora), origin.teachers, machine, dtype),
        dtype=dtype,
        global_batch=batch,
        schedule=_schedule(config, typed, epoch_pairs, batch, first_batch) if epoch_pairs else None,
        num_answers=num_answers,
        answers=answers_wanted(num_answers, config.max_new_tokens, machine),
        sampling=Sampling(no_repeat_ngram_size=config.no_repeat_ngram_size),
        decoding=decoding_of(config),
        update=update_options(config),
        plan=plan_options(config),
        rules=Rules(config.eval_steps, config.best_metric, config.patience, config.early_stop, config.plots),
        teachers=tuple(teacher.identity for teacher in origin.teachers),
    )


def decoding_of(config):
    """The Sampling that the options ask for; greedy where they leave the choice open."""
    return Sampling(
        temperature=max(config.temperature, 0.0), top_k=config.top_k, top_p=config.top_p, min_p=config.min_p,
        repetition_penalty=config.repetition_penalty or 1.0, no_repeat_ngram_size=config.no_repeat_ngram_size,
    )  # fmt: skip


def memory_spec(config, model_config, dtype, machine, lora=None):
    """MemorySpec of a run with these options that trains such a network, or a LoraConfig's adapter of it."""
    kernels = has_kernels(torch.device(machine.device_type), dtype, *model_config.kernel_sizes)
    network = MemorySpec(
        family_of(model_config), model_config, dtype.itemsize, kernels, config.dropout > 0 or config.lora_dropout > 0,
        config.trainable, lora, num_ranks=machine.num_processes,
    )  # fmt: skip
    num_sharing = machine.num_processes if config.share_state == "True" else 1
    if config.master_dtype == "bf16":
        if dtype == torch.float32:
            raise ValueError("--master_dtype=bf16: this run computes in float32: type --mixed_precision=bf16 too")
        network = replace(network, has_masters=False)
    network = replace(
        network, offloads=config.offload == "optimizer", offloads_inputs=config.activation_offload == "True"
    )
    spec = with_optimizer(replace(network, averages=config.average > 0), config.optimizer, num_sharing)
    if machine.launch_tokens:
        spec = replace(spec, launch_tokens=machine.launch_tokens)
    # counted on one rank, too, which has no sum
    sends_bf16 = config.reduce_dtype == "bf16" or not spec.has_masters and machine.num_processes > 1
    number_bytes = 2 if sends_bf16 else 4 if spec.own_part else 0
    return replace(spec, sum_bytes=buffer_bytes(spec.trained, number_bytes))


def with_optimizer(spec, name, num_sharing=1):
    """`spec` with the bytes of the optimizer of this name, whose state so many ranks share."""
    optimizer = OPTIMIZERS[name]
    state, update = optimizer.needed_bytes(spec.trained, spec.trained_matrix_numbers)
    if spec.offloads:
        update += HostAdamW.update_bytes(spec.trained)
    elif not spec.has_masters:
        update += 8 * min(spec.trained, ROUNDED_TOGETHER)  # with gradients
    spec = replace(spec, state_bytes=state, update_bytes=update, own_part=None)
    if num_sharing == 1:
        return spec
    numbers = part_numbers(spec, optimizer.part_ends, num_sharing)
    states, updates = zip(*(optimizer.needed_bytes(*part) for part in numbers), strict=True)
    own = OwnPart(max(weights for weights, _ in numbers), max(states))
    return replace(spec, update_bytes=max(update, *updates), own_part=own)


def fitted(recipe, lengths, usable_bytes):
    """`recipe` with what it leaves to the plan: the first of `_ways` to hold masters and state with which a step fits.

    `lengths` are those of its examples; `usable_bytes` are those of a rank's device, None for a CPU. Where no way fits,
    it has the last.
    """
    ways = [with_config(recipe, config) for config in _ways(recipe)]
    return next((way for way in ways if usable_bytes is None or _fits(way, lengths, usable_bytes)), ways[-1])


def _fits(recipe, lengths, usable_bytes):
    try:
        choose_plan(recipe.plan, recipe.estimate(lengths), usable_bytes)
        return True
    except NothingFits:
        return False


def _ways(recipe):
    """The options that `recipe` may have, those that cost least time first; fewer bits come last."""
    config = recipe.config
    many, lone = recipe.machine.num_processes > 1, config.optimizer == "adamw" and may_move(recipe)
    may = dict(
        activation_offload=config.activation_offload == "auto" and may_offload_inputs(recipe),
        share_state=config.share_state == "auto" and may_share(recipe),
        offload=config.offload == "auto" and lone and config.share_state != "False",
        master_dtype=config.master_dtype == "auto" and lone and recipe.dtype == torch.bfloat16 and not recipe.spec.lora,
    )
    least = {name: value for name, value in UNMOVED.items() if getattr(config, name) == "auto"}
    moved = dict(activation_offload="True", share_state="True", offload="optimizer", master_dtype="bf16")
    yield replace(config, **least)
    inputs = ["activation_offload"]
    state = ["share_state"], ["offload"], ["master_dtype"], ["offload", "master_dtype"]
    for names in (inputs, *state, *(inputs + names for names in state)):
        if all(may[name] for name in names):
            also = ["share_state"] if names != inputs and may["share_state"] or many and "offload" in names else []
            yield replace(config, **least | {name: moved[name] for name in (*names, *also)})


def may_offload_inputs(recipe):
    """Whether recomputed blocks' inputs can leave the device, which holds what is not computed again or is captured."""
    config = recipe.config
    return recipe.spec.kernels and config.gradient_checkpointing != "False" and config.compile != "True"


def may_share(recipe):
    """Whether the ranks of a run can share masters and state."""
    return recipe.config.optimizer not in UNSHAREABLE and may_move(recipe) and recipe.machine.num_processes > 1


def may_move(recipe):
    """Whether masters and state may lie elsewhere than whole on each device."""
    return not recipe.config.average


def with_config(recipe, config):
    """`recipe` with options `config` that differ in what the memory holds alone."""
    spec = memory_spec(config, recipe.model_config, recipe.dtype, recipe.machine, recipe.spec.lora)
    spec = replace(spec, teachers=recipe.spec.teachers)
    return replace(recipe, config=config, spec=spec, update=update_options(config))


def _schedule(config, typed, epoch_pairs, batch, first_batch):
    """The Schedule of a run; ValueError if a warm-up that was typed is as long as the run."""
    total_pairs = run_pairs(config, epoch_pairs, first_batch)
    warmup = warmup_pairs(config, total_pairs, first_batch)
    check_warmup(config, typed, warmup / batch, total_pairs / batch)
    rate = LearnRate(config.learn_rate, config.lr_schedule, warmup, total_pairs)
    return Schedule(total_pairs, batch, config.seed, rate)


def update_options(config):
    """The UpdateOptions of a TrainConfig."""
    return UpdateOptions(
        config.optimizer, config.learn_rate, config.weight_decay, config.max_grad_norm, config.spike_guard,
        config.reduce_dtype, config.share_state == "True", config.master_dtype, config.offload, config.seed,
        config.average,
    )  # fmt: skip


def plan_options(config):
    """The PlanOptions of a TrainConfig."""
    return PlanOptions(
        config.micro_batch_tokens, config.gradient_checkpointing, config.compile, config.max_seq_len,
        config.gpu_memory_limit_gb,
    )  # fmt: skip


def answers_asked(config, objectives):
    """Answers that an evaluation generates; ValueError if best/ is to be chosen by what an evaluation does not tell."""
    names = judged_objectives(config)
    if config.best_metric == "accuracy" and not all("accuracy" in objectives[name].metrics for name in names):
        raise ValueError(
            f"--best_metric=accuracy: {', '.join(names)} prefers no response to another: leave it out, or train with "
            "--objective=dpo, orpo or simpo"
        )
    if not config.validation_file or not config.bleu_pairs:
        return 0
    if len(names) == 1 and objectives[names[0]].has_answers:
        return config.bleu_pairs
    if config.best_metric in ("bleu", "chrf"):
        raise ValueError(
            f"--best_metric={config.best_metric}: {', '.join(names)} of the validation file has no answers to compare: "
            "leave it out, or give a file of pairs, --validation_file=pairs:FILE"
        )
    return 0


def answers_wanted(count, new_tokens, machine):
    """The Answers of a rank: all of its share of the `count` questions together, if the memory allows."""
    share = max(-(-count // machine.num_processes), 1)
    return Answers(share if machine.device_type == "cuda" else min(share, CPU_ANSWERS), new_tokens)
