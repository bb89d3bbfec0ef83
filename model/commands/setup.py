"""Makes all that a run needs before its first step: data, tokenizer, model, optimizer, state and plan."""

import logging
from concurrent.futures import wait
from dataclasses import asdict, replace

import torch

from model.commands.adapter import without_adapter
from model.commands.exporting import DECODING
from model.commands.foresight import check_disk, check_host, tell_what_moved, warn_of_data
from model.commands.machine import machine_of
from model.commands.network import draft_model, fill_model, refill_model, start_kernels
from model.commands.no_model import check_tested
from model.commands.origin import find_origin, newest_checkpoint, restore, with_validation
from model.commands.recipe import fitted, resolve
from model.commands.reference import read_derived, with_reference
from model.commands.run import Run
from model.commands.run_data import open_data, open_examples
from model.commands.run_files import described_objective, files_of, train_option
from model.commands.same_run import check_same_run, why_not_compared
from model.commands.teachers import place_teachers, without_teacher
from model.display.catalogue import texts_here
from model.memory.plan import MemoryPlan, choose_plan
from model.nn.lora import lora_values
from model.nn.registry import config_values
from model.run.train_state import TrainState, kept_recovery, state_values
from model.runtime.device_memory import check_gates, free_bytes, limit_memory, non_torch_bytes, other_process_bytes
from model.runtime.distributed import agree, from_main, vote
from model.runtime.laps import lap
from model.runtime.watchdog import untimed
from model.train.dry_run import dry_run_update, gradient_seconds, plan_run
from model.train.evaluate import Evaluation
from model.train.examples import check_lengths
from model.train.loader import Loader
from model.train.optim import make_optimizer
from model.train.step import StepContext

LOGGER = logging.getLogger("chat_trainer")


def prepare_run(ranks, config, typed, resumed):
    """(Run, TrainState, MemoryPlan) of a new run, or at the newest undamaged checkpoint if `resumed`.

    `typed` holds the names of the options on the command line. Raises ValueError if the options contradict each other,
    the data or the checkpoint.
    """
    if config.deterministic:  # False, too, would import torch._inductor, which takes 4 s
        torch.use_deterministic_algorithms(True)
    other_process, usable = _agreed_limit(ranks, config.gpu_memory_limit_gb)
    free = dict(start=free_bytes())
    # errors in tokenizer, weights and model are found before tokenising, which may take hours
    found = newest_checkpoint(ranks, config.output_dir) if resumed else None
    origin, source = find_origin(ranks, config, typed, found), config.finetune_from_ckp_file
    tokenizer, recipe = origin.tokenizer, resolve(config, typed, machine_of(ranks), origin)
    agree(ranks, "the compute dtype (--mixed_precision=no works on every GPU)", str(recipe.dtype))
    lap("weights")
    check_disk(ranks, config.output_dir, config.keep_latest_n_ckp, recipe.spec, resumed)
    kernels = start_kernels(ranks, draft_model(recipe), recipe)
    recipe, train, validation = _read_data(ranks, config, typed, recipe, origin)
    recipe = _fitted_here(ranks, recipe, train.histogram, usable)
    model = draft_model(recipe)
    estimate = recipe.estimate(train.histogram)
    plan = choose_plan(recipe.plan, estimate, usable)  # refuses what cannot fit before anything is allocated
    check_host(ranks, recipe.spec, estimate.host_bytes(*plan.batching))
    _fill_with_teachers(ranks, model, recipe, origin, train)
    reference, (train, validation) = read_derived(model, ranks, source, found, (train, validation), plan)
    free["model"] = free_bytes()
    optimizer = make_optimizer(model, recipe.update, (ranks.rank, ranks.world_size))
    free["optimizer"] = free_bytes()
    lap("model")
    update_seconds = _try_update(ranks, model, optimizer, config.reduce_dtype, kernels)
    context = StepContext(ranks, model, optimizer, Loader(ranks, train, recipe.schedule), recipe.update)
    run = Run(recipe, tokenizer, context, _evaluation(recipe, context, validation, tokenizer))
    state = replace(_initial_state(run, found), reference=reference)
    run, state, plan = _planned(run, estimate, state, found, other_process)
    run.memory["step_seconds"] = update_seconds + gradient_seconds(context, plan)
    lap("dry run")
    check_gates(free | dict(ready=free_bytes()), plan.predicted_peak_bytes)
    agree(ranks, "the position of the run and its plan", state_values(state))
    return run, state, plan


def set_memory_limit(device, limit_gb):
    """Limit this process's memory on `device`; returns (bytes that other processes use there, bytes usable here)."""
    other_process = other_process_bytes(device)
    return other_process, limit_memory(device, limit_gb, non_torch_bytes(device, other_process))


def _agreed_limit(ranks, limit_gb):
    """As `set_memory_limit`, with the least of all ranks as the bytes usable."""
    other_process, usable = set_memory_limit(ranks.device, limit_gb)
    return other_process, None if usable is None else -vote(ranks, -usable)[0]


def _read_data(ranks, config, typed, recipe, origin):
    """(Recipe that knows the number of pairs, Examples to train on, those to evaluate on or None)."""
    train, validation = open_data(ranks, recipe, origin.tokenizer)
    recipe = resolve(config, typed, recipe.machine, origin, train.epoch_pairs)
    train = replace(train, dropout=recipe.spec.dropout)  # which the number of pairs decides
    if ranks.is_main:
        warn_of_data(train, origin.tokenizer, config.finetune_from_ckp_file, recipe.global_batch)
    lap("data")
    return recipe, train, validation


def _fitted_here(ranks, recipe, lengths, usable):
    """`fitted`, told to the user."""
    fitting = fitted(recipe, lengths, usable)
    if ranks.is_main:
        tell_what_moved(recipe.held, fitting.held)
    return fitting


def _fill_with_teachers(ranks, model, recipe, origin, train):
    """`fill_model`, and the teachers that the model learns from; raises ValueError if `train` is too long for one."""
    fill_model(ranks, model, recipe, origin)
    model.teachers = place_teachers(ranks, origin.teachers, recipe.dtype)
    for teacher in model.teachers:
        check_lengths(train, teacher.config.max_tokens)


def _try_update(ranks, model, optimizer, reduce_dtype, kernels):
    """Seconds that an update takes, which changes nothing; the Futures `kernels` of start_kernels are done then."""
    update_seconds = dry_run_update(ranks, model, optimizer, reduce_dtype)
    lap("update")
    with untimed("compiling the network's kernels"):
        wait(kernels)
    lap("kernels")
    return update_seconds


def _evaluation(recipe, context, validation, tokenizer):
    """The Evaluation of a run on the Examples `validation`; None without them."""
    if validation is None:
        return None
    return Evaluation(
        context.ranks, context.model, validation, tokenizer,
        recipe.num_answers, recipe.config.max_new_tokens, recipe.sampling,
    )  # fmt: skip


def _planned(run, estimate, state, found, other_process):
    """(Run, TrainState, MemoryPlan) once the plan was tried on the device."""
    device_type = run.recipe.machine.device_type
    stored_plan = MemoryPlan(**state.plan) if state.plan and state.device == device_type else None
    plan, memory = plan_run(run.context, run.evaluation, estimate, run.recipe.plan, stored_plan, other_process)
    may_capture = run.recipe.plan.compile != "False" and run.recipe.spec.can_capture
    recovery = kept_recovery(state, plan, may_capture)
    differs = found.state.differs(plan, state.world_size) if found else ()
    state = replace(state, plan=asdict(plan), growth=recovery, device=device_type)
    return replace(run, memory=memory, differs=differs), state, plan


def _initial_state(run, found):
    """TrainState of a new run, or of the Checkpoint `found`, which is loaded into the run's model and optimizer.

    Raises ValueError if the checkpoint belongs to another run.
    """
    validation = run.evaluation and run.evaluation.examples.store
    fresh = new_state(run.recipe, run.tokenizer, run.train.store, run.train.mixture, validation)
    if not found:
        return fresh
    check_same_run(found, train_option(run.config), fresh)
    if run.ranks.is_main and (why := why_not_compared(found.state, fresh)):
        LOGGER.info("%s: of the training pairs only their number, %d, is compared", why, fresh.num_pairs)
    state = restore(run.ranks, run.model, run.optimizer, found)
    state = with_validation(validation, run.ranks, state) if validation else state
    if state.best_metric != fresh.best_metric:
        if run.ranks.is_main:
            LOGGER.info(texts_here()("begins.metric", was=state.best_metric, now=fresh.best_metric))
        state = replace(state.without_best(), best_metric=fresh.best_metric)
    return replace(
        state, ids_sha256=fresh.ids_sha256, max_seq_len=fresh.max_seq_len, shape=fresh.shape, lora=fresh.lora
    )


def new_state(recipe, tokenizer, train, mixture, validation=None):
    """TrainState before the first step of a run on the TokenStore `train`, evaluated on `validation` (or nothing).

    An empty `train` stands for pairs that are unknown.
    """
    config, lora = recipe.config, recipe.spec.lora
    return TrainState(
        first_batch=recipe.global_batch, seed=config.seed, num_pairs=len(train),
        ids_sha256=train.meta["ids_sha256"] if train else "", max_seq_len=config.max_seq_len,
        shape=config_values(recipe.model_config), lora=lora and lora_values(lora),
        tokenizer_fingerprint=tokenizer.fingerprint, world_size=recipe.machine.num_processes,
        validation=validation.identity if validation else "", objective=described_objective(config, recipe.teachers),
        best_metric=recipe.rules.best_metric, mixture=mixture.identity if mixture else "",
    )  # fmt: skip


def prepare_test(ranks, config, typed, directory=None):
    """(Run, MemoryPlan) to evaluate a model on test_file, which is used for both data files.

    The model is that in `directory`, else best/ of the run, and last/ of one without evaluations. Raises ValueError if
    there is none. Answers are greedy, unless the option names `typed` on the command line say how they are decoded.
    """
    file = config.test_file or config.validation_file
    if not file:
        raise ValueError("test_file and validation_file are empty: type --test_file=FILE")
    files = files_of(config, "test_file" if config.test_file else "validation_file")
    tested, source = directory or from_main(ranks, check_tested, config), config.finetune_from_ckp_file
    config = replace(options_of_test(config, tested), validation_file=file)
    origin, machine = find_origin(ranks, config, ()), machine_of(ranks)
    recipe = resolve(config, (), machine, origin)
    examples = open_examples(ranks, recipe, origin.tokenizer, files, evaluated=True)
    recipe = resolve(config, (), machine, origin, examples.epoch_pairs)
    if typed & set(DECODING):
        recipe = replace(recipe, sampling=recipe.decoding)
    other_process, usable = set_memory_limit(ranks.device, config.gpu_memory_limit_gb)
    model, estimate = fill_model(ranks, draft_model(recipe), recipe, origin), recipe.estimate(examples.histogram)
    if examples.objective.derived:
        plan = choose_plan(recipe.plan, estimate, usable)
        examples = with_reference(model, ranks, source, config.seed, examples, plan)
        refill_model(ranks, model, origin, tested)
    context = StepContext(ranks, model, None, Loader(ranks, examples, recipe.schedule), recipe.update)
    evaluation = _evaluation(recipe, context, examples, origin.tokenizer)
    plan, _ = plan_run(context, evaluation, estimate, recipe.plan, None, other_process)
    return Run(recipe, origin.tokenizer, context, evaluation), plan


def options_of_test(config, tested):
    """The options of a test of the model in `tested`, in place of the training's for steps, memory and CUDA graphs."""
    steps = dict(epochs=1, max_steps=0, gradient_accumulation_steps=1, global_batch_size=0)
    planned = dict(micro_batch_tokens=0, gradient_checkpointing="auto", compile="False", tokenizer_dir="")
    planned["activation_offload"] = "auto"
    held = dict(share_state="auto", master_dtype="float32", offload="none")
    own = without_teacher(without_adapter(config))  # an exported model is merged
    return replace(own, finetune_from_ckp_file=tested, **steps, **planned, **held)


def load_tested(ranks, config, directory=None):
    """(Recipe, tokenizer, network) of a test without a file of pairs, of the model in `directory` or of the run."""
    config = options_of_test(config, directory or from_main(ranks, check_tested, config))
    origin = find_origin(ranks, config, ())
    recipe = resolve(config, (), machine_of(ranks), origin)
    set_memory_limit(ranks.device, config.gpu_memory_limit_gb)
    return recipe, origin.tokenizer, fill_model(ranks, draft_model(recipe), recipe, origin)
