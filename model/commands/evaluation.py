"""Evaluations of a run: when one is due, best/, and what follows when the model no longer gets better."""

import logging
import math
import time
from contextlib import nullcontext
from dataclasses import replace

from model.commands.exporting import export
from model.commands.run_events import say
from model.display.catalogue import texts_here
from model.display.console import epoch_line, sample_line
from model.display.drawing import draw_soon
from model.run.run_dir import is_exported
from model.runtime.distributed import from_main, vote
from model.runtime.watchdog import stop_asked
from model.train.evaluate import evaluate_loss, measure, samples_of

LOGGER = logging.getLogger("chat_trainer")


class TrainingLoss:
    """Mean training loss since the last evaluation, from the journal's train lines."""

    def __init__(self):
        self._total, self._weight = 0.0, 0

    def add(self, line: dict) -> None:
        """Take in the values of a train line; those of steps that were all left out have no loss."""
        if math.isfinite(line["loss"]):
            self._total += line["loss"] * line["target_tokens"]
            self._weight += line["target_tokens"]

    def take(self) -> float | None:
        """The mean over the lines since the last call; None if there was none."""
        mean = self._total / self._weight if self._weight else None
        self._total, self._weight = 0.0, 0
        return mean


def evaluation_due(run, state):
    """True if the weights of `state` need an evaluation: at the end of each epoch and every eval_steps, once."""
    if run.evaluation is None or state.step == state.evaluated_step:
        return False
    is_epoch_end = state.pairs_seen % run.train.epoch_pairs == 0 or state.pairs_seen >= run.schedule.total_pairs
    return bool(is_epoch_end or (run.rules.eval_steps and state.step % run.rules.eval_steps == 0))


def lacks_evaluation(run, state):
    """Whether the last weights of a finished run were not evaluated, or their best/ not written."""
    return run.evaluation is not None and state.evaluated_step != state.step


def without_lost_best(run, state):
    """`state`, but without evaluation and best loss if best/ is missing: the next evaluation then writes best/."""
    if not state.evaluated_step or from_main(run.ranks, is_exported, run.dir / "best"):
        return state
    say(run.ranks, texts_here()("begins.no_best", best=run.dir / "best"))
    return state.without_best()


def ends_early(run, state):
    """Whether early_stop ends the run with the evaluation of `state`."""
    return 0 < run.rules.early_stop <= state.evaluations_since_best and run.evaluation is not None


def why_finished(run, state):
    """Why there are no more steps after `state`, and what to change for more; "" if there are."""
    text = texts_here()
    if ends_early(run, state):
        return text("finished.early", count=state.evaluations_since_best)
    if state.pairs_seen < run.schedule.total_pairs:
        return ""
    if run.config.max_steps:
        return text("finished.steps", done=state.step, asked=run.config.max_steps)
    return text("finished.epochs", done=state.pairs_seen / run.train.epoch_pairs, asked=run.config.epochs)


def is_finished(run, state):
    """Whether there is nothing left to do after `state`: no step and no evaluation."""
    return bool(why_finished(run, state)) and not lacks_evaluation(run, state)


def evaluate(run, journal, saver, state, plan, training_loss):
    """Evaluate, and export best/ if the model is the best so far; returns the state and whether to stop.

    `training_loss` is that of the steps since the last evaluation, None if unknown.
    """
    ranks, started, average = run.ranks, time.monotonic(), run.optimizer.average
    measured, losses = measure_better(run.evaluation, average, plan, state.step, journal.write)
    if measured is None:
        return state, True
    scores, answers = measured
    averaged = bool(losses and losses["averaged"])
    seconds, epoch = time.monotonic() - started, state.pairs_seen / run.train.epoch_pairs
    is_best = ranks.is_main and is_better(run, state, scores)
    since_best = 0 if is_best else state.evaluations_since_best + 1
    gap = None if training_loss is None else scores["loss"] - training_loss
    values = losses | dict(overfit_gap=gap, evaluations_since_best=since_best, seconds=seconds)
    values |= dict(samples=samples_of(answers)) if answers else {}
    journal.write("eval", step=state.step, epoch=epoch, **scores, **values)
    if run.draws and state.pairs_seen < run.schedule.total_pairs:
        draw_soon(run.dir)  # not at the end, when all is drawn once more
    failure = ""
    if is_best:
        with average.in_place_of_weights() if averaged else nullcontext():
            failure = export(run, state, "best", scores, saver.weights_files(state, averaged))
    stop, is_best, failed = vote(ranks, stop_asked(), is_best, bool(failure))
    if not failed:  # else the next evaluation or the next start tries again
        since_best = 0 if is_best else state.evaluations_since_best + 1
        state = replace(state, evaluated_step=state.step, evaluations_since_best=since_best)
    if is_best and not failed:
        metric = run.rules.best_metric
        score = None if metric == "loss" else scores[metric]
        state = replace(state, best_loss=scores["loss"], best_score=score, best_step=state.step)
    told = dict(val_loss=scores["loss"], cur_bleu4=scores.get("bleu"), cur_chrf=scores.get("chrf"))
    best = dict(best_val_loss=state.best_loss, best_step=state.best_step)
    say(ranks, epoch_line(scores | losses | told | best | dict(epoch=epoch, step=state.step)))
    for sample in values.get("samples", ()):
        say(ranks, sample_line(sample))
    warn_of_no_gain(run, state)
    return state, bool(stop)


def make_up_evaluation(run, journal, saver, state, plan):
    """Evaluate if the run stopped before an evaluation that was due; returns the state and whether to stop."""
    if not evaluation_due(run, state):
        return state, False
    evaluated, stop = evaluate(run, journal, saver, state, plan, None)
    if evaluated != state:  # the next start must not repeat it
        saver.save(evaluated, run.model, run.optimizer)
    return evaluated, stop


def measure_better(evaluation, average, plan, step, note):
    """(`measure` of the weights or of their average, whichever has the lower loss, a dict of what tells them apart).

    The dict is empty without an `average`; the first is None if a stop was asked.
    """
    if average is None:
        return measure(evaluation, plan, step, note), {}
    own = evaluate_loss(evaluation, plan, step, note)
    if own is None:
        return None, {}
    with average.in_place_of_weights():
        measured = measure(evaluation, plan, step, note)
    if measured is None:
        return None, {}
    loss = measured[0]["loss"]
    (averaged,) = vote(evaluation.ranks, evaluation.ranks.is_main and loss < own["loss"])
    losses = dict(averaged=bool(averaged), weights_loss=own["loss"], average_loss=loss)
    return measured if averaged else measure(evaluation, plan, step, note), losses


def is_better(run, state, scores):
    """Whether a model of these scores becomes best/: there is none, or it is worse."""
    metric = run.rules.best_metric
    best = state.best_loss if metric == "loss" else state.best_score
    if best is None or not is_exported(run.dir / "best"):
        return math.isfinite(scores[metric])
    return scores[metric] < best if metric == "loss" else scores[metric] > best


def warn_of_no_gain(run, state):
    """Say what to do after `patience` evaluations without a better one, or that the run ends."""
    rules, count, text = run.rules, state.evaluations_since_best, texts_here()
    if not run.ranks.is_main or not count:
        return
    values = dict(count=count, metric=text(f"metric.{rules.best_metric}"), step=state.best_step)
    if ends_early(run, state):
        LOGGER.warning(text("early_stop", **values))
    elif count == rules.patience:
        LOGGER.warning(text("overfit", **values))
