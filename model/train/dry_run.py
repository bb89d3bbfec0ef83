"""Before step 0: what could fail for the first time later is done once, and the plan is measured on the device.

Weights, optimizer state and random numbers are afterwards as they were.
"""

import logging
from dataclasses import asdict, replace
from functools import partial

import numpy as np
import torch

from model.data.length_histogram import histogram
from model.generate.answers import answer, answering
from model.memory.estimate import Estimate
from model.memory.oom_policy import plan_after_out_of_memory, shrink_plan
from model.memory.plan import NothingFits, choose_plan, predicted_peaks, recording_asked
from model.nn.t5.batch import collate
from model.nn.t5.huggingface import as_hugging_face
from model.runtime.device_memory import is_out_of_memory, limit_memory, memory_cap, non_torch_bytes, release_memory
from model.runtime.distributed import sum_over_ranks, vote
from model.runtime.watchdog import unhurried
from model.train.evaluate import evaluating
from model.train.footprint import estimate_for
from model.train.gradients import Outcome, attempt_gradients
from model.train.loader import Work
from model.train.optim import reset_state, update

LOGGER = logging.getLogger("chat_trainer")
PROBES = 3
SAMPLED_EXAMPLES = 2**14  # of which some fill what the longest leave of a forward
KEPT_USABLE = 1.1  # by prediction: a kept plan was measured, at as little as nine tenths of that, and is again


def rehearse_update(ranks, model, optimizer):
    """Do one full-size reduction and one update, of gradients that are zero at a rate of zero.

    The collective's buffers and the optimizer's state exist from now on. `optimizer` must be fresh.
    """
    model.zero_grad()
    sum_over_ranks(ranks, model.flat.gradients_and_parts)
    in_own_time(ranks, update, optimizer, model.flat.gradients, 0.0, torch.zeros((), device=ranks.device))
    reset_state(optimizer)


def in_own_time(ranks, work, *args):
    """What `work(*args)`, which may compile for minutes, gives once every rank is done: no time limit counts here."""
    with unhurried("compiling what the first step needs"):
        value = work(*args)
    vote(ranks, 0)
    return value


def plan_run(run, kept, other_process):
    """(MemoryPlan that all ranks can hold, what it rests on and what was measured): `kept` while it still fits.

    `kept` is the checkpoint's plan or None, `foreign` the bytes of the device that other processes hold. Raises
    NothingFits, or ValueError where the options ask for what cannot be.
    """
    ranks, config, device = run.ranks, run.config, run.ranks.device
    model_config, dtype = run.model.config, run.model.compute_dtype
    estimate = estimate_for(ranks, config, model_config, dtype, run.train.lengths, run.schedule.global_batch)
    non_torch = non_torch_bytes(device, other_process)
    usable = limit_memory(device, config.gpu_memory_limit_gb, non_torch)
    usable = None if usable is None else -vote(ranks, -usable)[0]  # the smallest over ranks
    plan, choose = plan_before_probes(run, kept, estimate, usable)
    measured = {}
    if usable is not None and run.optimizer is not None:
        plan, measured["step"] = rehearse_plan(run, estimate, plan, choose)
        measured |= rehearse_evaluation(run, plan)
    if ranks.is_main:
        LOGGER.info("plan: %s", ", ".join(f"{name}={value}" for name, value in asdict(plan).items()))
    unrecorded = estimate.peaks(*plan.cutting, plan.answers)  # as what was measured
    predicted = predicted_peaks(estimate, plan) | {name: unrecorded[name] for name in measured}
    phases = {name: dict(predicted=count, measured=measured.get(name)) for name, count in predicted.items()}
    return plan, dict(
        phases=phases, cap_bytes=memory_cap(device, config.gpu_memory_limit_gb), non_torch_bytes=non_torch,
        other_process_bytes=other_process, allocator_limit_bytes=usable,
    )  # fmt: skip


def _still_asked_for(kept, config, estimate, usable_bytes):
    if kept is None or config.micro_batch_tokens:
        return False
    step_peak = estimate.of_longest_responses.step_peak
    fits = usable_bytes is None or step_peak(*kept.cutting) <= usable_bytes * KEPT_USABLE
    return fits and config.gradient_checkpointing in ("auto", str(kept.gradient_checkpointing))


def plan_before_probes(run, kept, estimate, usable_bytes):
    """(MemoryPlan, what chooses another for a probe's calibration, None where nothing is to be chosen).

    That of `kept` while it still fits. A run that goes on records steps if it did: padding changes the order of sums,
    and so the last bits.
    """
    config = run.config
    asked = recording_asked(config, estimate.spec, len(run.train) * config.epochs / run.schedule.global_batch)
    if kept and config.compile == "auto":
        asked = kept.graphs and estimate.spec.kernels and not estimate.spec.dropout
    if _still_asked_for(kept, config, estimate, usable_bytes):
        return replace(kept, graphs=bool(asked)), None
    choose = partial(choose_plan, config, estimate, usable_bytes, asked)
    return choose(), None if config.micro_batch_tokens else choose


def rehearse_plan(run, estimate, plan, choose):
    """(plan, measured peak reserved bytes of a step over all ranks): tried on the device, or less than one that was.

    At most PROBES times the examples of `worst_examples` are run, forward and backward. Where what that took is not
    what was predicted, the plan is what `choose` gives for the ratio; None lets `plan` be.
    """
    fitted = None
    for number in range(PROBES):
        ids = worst_examples(run.train.lengths, plan.micro_batch_tokens, estimate.share_pairs)
        measured = _step_peak(run, plan, ids)
        if measured is None and fitted:
            break
        if measured is None:
            shrink = partial(shrink_plan, longest_tokens=estimate.lengths.longest)
            smaller = plan_after_out_of_memory(run.ranks.device, replace(plan, graphs=False), 2, shrink)
            plan, choose = replace(smaller, graphs=plan.graphs), None  # nothing is recorded in a probe
            continue
        fitted, calibration = (plan, measured), measured / _predicted(estimate, run.train.lengths[ids], plan)
        try:
            better = choose(calibration) if choose else plan
        except NothingFits:  # with a margin; this plan did
            break
        last = number == PROBES - 1
        takes_less = estimate.step_peak(*better.cutting) < estimate.step_peak(*plan.cutting)
        if better.cutting == plan.cutting or last and plan.graphs and takes_less:  # it left its recordings too little
            return better, measured
        if last:
            break
        if run.ranks.is_main:
            LOGGER.info("a probe took %.3f of its predicted peak: planning again", calibration)
        plan = better
    if fitted:
        return fitted
    raise NothingFits(f"{PROBES} probes ran out of memory, the last with {plan}: lower --max_seq_len or free the GPU")


def _predicted(estimate, lengths, plan):
    """Peak reserved bytes predicted for one forward of examples of these `lengths` under `plan`, and its backward."""
    own = Estimate(estimate.spec, histogram(lengths), len(lengths))
    return own.step_peak(int(lengths.sum(dtype=np.int64)), *plan.cutting[1:])


def _step_peak(run, plan, ids):
    """Peak reserved bytes of these examples' forward and backward, over all ranks; None if any ran out."""
    ranks, model, store = run.ranks, run.model, run.train
    targets, tokens = int(store.lengths[ids, 1].sum(dtype=np.int64)), int(store.lengths[ids].sum(dtype=np.int64))
    work = Work(0, 1, ids, tokens, targets, 0.0, run.schedule.start_id, ((ranks.rank, ids),))
    release_memory(ranks.device)  # what loading left behind
    torch.cuda.reset_peak_memory_stats(ranks.device)
    attempt = in_own_time(ranks, attempt_gradients, ranks, model, store, plan, run.config, work)
    peak = torch.cuda.max_memory_reserved(ranks.device)
    release_memory(ranks.device)
    failed, highest = vote(ranks, attempt.outcome is Outcome.OUT_OF_MEMORY, peak)
    return None if failed else highest


def worst_examples(lengths, micro_batch_tokens, share_pairs):
    """Ids of the costliest forward as steps are cut: the longest responses, at least one, and what fits beside them."""
    ids = _longest_responses(lengths, micro_batch_tokens, share_pairs)
    left, pairs_left = micro_batch_tokens - int(lengths[ids].sum(dtype=np.int64)), share_pairs - len(ids)
    sample = np.setdiff1d(np.arange(0, len(lengths), len(lengths) // SAMPLED_EXAMPLES + 1), ids)
    totals, beside = lengths[sample].sum(axis=1, dtype=np.int64), []
    for place in np.lexsort((-totals, -lengths[sample, 1].astype(np.int64))):
        if totals[place] <= left and len(beside) < pairs_left:
            beside.append(sample[place])
            left -= totals[place]
    return np.append(ids, np.array(beside, ids.dtype))


def _longest_responses(lengths, micro_batch_tokens, share_pairs):
    """Ids of the longest responses, in their order as many as fit one forward, at least one."""
    responses, first = lengths[:, 1], max(len(lengths) - share_pairs, 0)
    long = np.flatnonzero(responses >= np.partition(responses, first)[first])  # few of a corpus of millions
    totals = lengths[long].sum(axis=1, dtype=np.int64)
    order = np.lexsort((-totals, -responses[long].astype(np.int64)))[:share_pairs]
    fits = np.cumsum(totals[order]) <= micro_batch_tokens
    return long[order[: max(int(fits.sum()), 1)]]


def rehearse_evaluation(run, plan):
    """Peak reserved bytes, over all ranks, of the worst forward of an evaluation and of a batch of answers.

    0 where a rank ran out of memory: the evaluation itself will go on in smaller pieces.
    """
    works = dict(evaluation=_worst_evaluation) | (dict(generation=_worst_generation) if run.config.bleu_pairs else {})
    measured = {}
    for name, work in works.items():
        torch.cuda.reset_peak_memory_stats(run.ranks.device)
        failed = in_own_time(run.ranks, _runs_out, work, run, plan)
        release_memory(run.ranks.device)
        failed, peak = vote(run.ranks, failed, torch.cuda.max_memory_reserved(run.ranks.device))
        measured[name] = 0 if failed else peak
    return measured


def _runs_out(work, *args):
    try:
        work(*args)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return True
    return False


def _worst_evaluation(run, plan):
    store = run.validation
    ids = worst_examples(store.lengths, plan.micro_batch_tokens, len(store))
    with evaluating(run.model):
        micro_batch = collate(store, ids, run.schedule.start_id, run.ranks.device, run.model.uses_kernels)
        run.model(micro_batch, plan.chunk_tokens).item()


def _worst_generation(run, plan):
    store, dtype = run.validation, run.model.compute_dtype
    ids = np.argsort(-store.lengths[:, 0].astype(np.int64), kind="stable")[: plan.answers]
    with answering(run.ranks, dtype):
        answer(as_hugging_face(run.model, run.tokenizer), store, run.tokenizer, ids, run.config.max_new_tokens)
