"""A run from start to end: options, ranks, data, model, plan, then steps with evaluations and checkpoints.

accelerate launch --multi_gpu --num_processes 3 ./train_low_mem.py train --is_keep_training=True
python train_low_mem.py train|plan|test|doctor [--any_field=value …]
"""

import gc
import logging
import os
import sys
import traceback
from pathlib import Path

from model.runtime.environment import explain_missing_packages

if __name__ == "__main__":
    explain_missing_packages()

from model.commands.options import KEEP_TRAINING, command_line, exit_early, read_request
from model.runtime.cgroup import limit_threads, num_cpus
from model.runtime.cuda_start import start_cuda
from model.runtime.watchdog import go_on_hint, stop_asked, training_begins, watch_signals

if __name__ == "__main__":  # before torch, which takes seconds to import
    gc.disable()  # what is imported stays: to look through it for garbage takes 0.3 s
    watch_signals()
    exit_early(sys.argv[1:])
    start_cuda()
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # before torch: less fragmentation
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA: --deterministic needs it
limit_threads()
if os.getloadavg()[0] > num_cpus():  # busy machine: threads that spin while waiting slow the others
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a run reads only local files

import fire
from fire.decorators import SetParseFn

from model.commands.comparison import test_models
from model.commands.decoding import choose_decoding
from model.commands.ending import complete, give_up
from model.commands.evaluation import (
    TrainingLoss,
    ends_early,
    evaluate,
    evaluation_due,
    is_finished,
    lacks_evaluation,
    make_up_evaluation,
    why_finished,
    without_lost_best,
)
from model.commands.exporting import export_last, is_early
from model.commands.origin import agree_on, broadcast_request
from model.commands.run_events import begin, log_steps, say, write_events
from model.commands.setup import prepare_run
from model.commands.summary import last_words
from model.commands.tested_models import check_comparison, shown_answers
from model.display.catalogue import texts_here
from model.display.console import Progress
from model.display.drawing import finish_last, start_last
from model.display.live import Pacing, live
from model.display.log_file import open_log
from model.display.trackers import check_installed
from model.memory.oom_policy import recovery_of
from model.memory.plan import NothingFits
from model.run.checkpoint import checkpoint_paths
from model.run.journal import Journal
from model.run.run_dir import admit, only_writer
from model.run.saver import Saver
from model.runtime.device_memory import release_memory
from model.runtime.distributed import from_main, start_ranks, stop_ranks, vote
from model.runtime.laps import laps
from model.runtime.launcher import command_to_go_on
from model.runtime.terminal import printable_lines
from model.train.spike_guard import TooManySkipped
from model.train.step import Position, TornUpdate, confirm, train_steps

LOGGER = logging.getLogger("chat_trainer")
LOGS_DIR = "logs"
LAST_STEPS = 200  # from which on a process waits to draw the curves
MAX_TORN_UPDATES = 3  # in a row from one checkpoint; then the run fails
ROOT = Path(__file__).resolve().parent


@SetParseFn(str)
def train(*stray, **options):
    """Train a model, or resume a run. Every field of TrainConfig is an option; docs/options.md lists them."""
    request = broadcast_request(stray, options)
    watch_signals()
    config = request.config
    ranks = start_ranks(config.backend, config.ddp_timeout_s)
    agree_on(ranks, request)
    if ranks.is_main:
        open_log(LOGS_DIR, request.preset, config.output_dir)
    from_main(ranks, check_installed, config.tracker)
    admitted = from_main(ranks, admit, config.output_dir, request.keep_training, request.overwrite)
    begins = texts_here()("first.resumed", checkpoint=admitted) if admitted else texts_here()("first.new")
    say(ranks, f"{config.output_dir}: {begins}")
    run, state, plan = prepare_run(ranks, config, request.typed, bool(admitted))
    with only_writer(ranks, run.dir, admitted, request.overwrite, run.tokenizer, run.config.finetune_from_ckp_file):
        state = without_lost_best(run, state)
        if is_finished(run, state):
            complete(run, state)
            say(ranks, texts_here()("finished", run_dir=run.dir, why=why_finished(run, state)))
            return
        if vote(ranks, stop_asked())[0]:
            raise KeyboardInterrupt
        training_begins(command_to_go_on(run.dir))
        num_torn = 0
        while num_torn < MAX_TORN_UPDATES:
            if train_from(run, request, state, plan):
                return
            run, start_step = None, state.step  # frees the memory for the next Run
            release_memory()
            is_saved = from_main(ranks, lambda: bool(checkpoint_paths(config.output_dir)))
            run, state, plan = prepare_run(ranks, config, request.typed, is_saved)
            num_torn = num_torn + 1 if state.step == start_step else 1
    raise RuntimeError(f"memory ran out in {MAX_TORN_UPDATES} updates, each time after a return to the checkpoint")


def train_from(run, request, state, plan):
    """Train to the end; False if memory ran out while weights were updated: the run must go back to its checkpoint."""
    with Journal(run.dir / "metrics.jsonl" if run.ranks.is_main else None) as journal:
        begin(run, journal, request, state, plan)
        try:
            finish(run, journal, *train_to_the_end(run, journal, state, plan))
        except TornUpdate as error:
            say(run.ranks, str(error))
            journal.write("oom", step=error.step, where="optimizer", rank=error.rank, before=None, after=None)
            return False
    return True


def train_to_the_end(run, journal, state, plan):
    """Train, evaluate and save; returns what `finish` needs. A stop does not wait for a plot."""
    config = run.config
    samples = run.dir / f"samples_rank{run.ranks.rank}.jsonl" if config.log_sample_ids else None
    saver = Saver(run.ranks, run.dir, config.keep_latest_n_ckp, journal)  # waits for its last checkpoint
    screen = live(run.ranks, run.dir, config.screen, config.gpu_memory_limit_gb, config.tracker)
    with screen, Journal(samples) as samples, saver:
        state, stop, drawing = train_and_save(run, journal, samples, saver, state, plan)
        if stop and not is_finished(run, state):  # a stop asked for in the last step changes nothing
            return state, "asked", saver, None
        return state, "finished", saver, drawing or start_last(run.dir, run.draws)


def train_and_save(run, journal, samples, saver, state, plan):
    """Train, evaluate and save; returns the last state, whether a stop was asked for, the process that draws curves."""
    config, schedule, pacing = run.config, run.schedule, Pacing(run.ranks.device, run.config.gpu_memory_limit_gb)
    recent, saved_at, result, saves, training_loss, drawing = [], None, None, False, TrainingLoss(), None
    context, steps = steps_after(run, state, plan)
    try:
        state, stop = make_up_evaluation(run, journal, saver, state, plan)
        is_over, draws_at = ends_early(run, state), max(run.total_steps(state) - LAST_STEPS, state.step + 1)
        # in pairs, as steps may have had another size before a resume
        with Progress("training", schedule.total_pairs, "pairs", state.pairs_seen, run.ranks.is_main) as progress:
            while not stop and not is_over and (result := next(steps, None)):
                state = state.after(result)
                recent.append(result)
                write_events(run, journal, samples, result)
                is_last = result.ends_epoch or result.stop or result.pairs_seen == schedule.total_pairs
                if is_last or result.step % config.logging_steps == 0:
                    training_loss.add(log_steps(run, journal, recent))
                    recent = []
                progress.update(result.pairs_seen, *pacing.after(result))
                if result.step == draws_at:
                    drawing = start_last(run.dir, run.draws)  # it loads its libraries meanwhile
                saved_at = result.clock_seconds if saved_at is None else saved_at
                is_late = result.clock_seconds - saved_at >= config.save_seconds
                saves = saves or is_last or is_late or result.step % config.save_steps == 0
                stop, evaluates = result.stop, evaluation_due(run, state) and not result.stop
                if saves or evaluates:
                    confirm(run.ranks, result)
                if evaluates:
                    make_ready_to_evaluate(run, context, saver, state, result)
                    state, stop = evaluate(run, journal, saver, state, result.plan, training_loss.take())
                    is_over = ends_early(run, state) and not result.in_doubt
                    saves = True
                stop = stop and not result.in_doubt  # saving and stopping wait for a step with finite numbers
                if saves and not result.in_doubt:
                    saver.save(state, run.model, run.optimizer)
                    saved_at, saves = result.clock_seconds, False
    except (NothingFits, TooManySkipped) as error:
        give_up(run, journal, saver, state, error, result)
        raise
    return state, stop, drawing


def steps_after(run, state, plan):
    """(their StepContext, an iterator over the StepResults of the steps after `state`)."""
    recovery = recovery_of(state.growth, plan)
    context = run.context.with_graphs() if recovery.full.graphs else run.context
    return context, train_steps(context, Position(plan, state.step, state.pairs_seen, recovery, state.recent_norms))


def make_ready_to_evaluate(run, context, saver, state, result):
    """Save, as an evaluation may take longer than save_seconds; delete the graphs if it needs their memory."""
    if context.graphs and not run.memory["keeps_graphs"]:
        context.graphs.clear()
    if not result.in_doubt:
        saver.save(state, run.model, run.optimizer)


def finish(run, journal, state, reason, saver, drawing):
    """Export last/, choose how the models answer, journal the end; raises RuntimeError if that is not on the disk."""
    ended_early, decoding = reason == "finished" and is_early(run, state), None
    failure = saver.failure
    if reason == "finished" and lacks_evaluation(run, state):
        failure = failure or f"{run.dir / 'best'} could not be written"
    try:
        export_last(run, state, failure, saver.weights_files(state))
        decoding = choose_decoding(run, state) if reason == "finished" else None
    finally:
        journal.write("stop", step=state.step, reason=reason, early=ended_early, startup=laps(), decoding=decoding)
    if run.ranks.is_main:
        finish_last(drawing)
        for line in last_words(run, state, "early" if ended_early else reason, decoding):
            say(run.ranks, line)


@SetParseFn(str)
def test(*models, **options):
    """Print the loss of a run's best/ model on test_file and what its answers are like, or its accuracy on choices.

    Of several models a table.
    """
    shown, options = shown_answers(options)
    if models:
        check_comparison(models, options)
    request = broadcast_request((), options, False if models else KEEP_TRAINING["test"])
    watch_signals()
    backend = request.config.backend if "backend" in request.typed else "auto"  # training may have used another machine
    ranks = start_ranks(backend, request.config.ddp_timeout_s)
    agree_on(ranks, request)
    if ranks.is_main:
        open_log(LOGS_DIR, request.preset, request.config.output_dir)
    test_models(ranks, request, models, shown)


@SetParseFn(str)
def doctor(*stray, **options):
    """Check all that a run with these options depends on; prints a table with a remedy for each problem."""
    from model.commands.doctor import print_table  # imported here: a training needs no part of it

    request = read_request(stray, options, KEEP_TRAINING["doctor"])
    print_table(request.config, request.typed, request.overwrite)


@SetParseFn(str)
def plan(*stray, **options):
    """Print what a run would take, here or on another machine; also takes --num_processes, --vocab_size, --json."""
    from model.commands.plan_report import plan_text  # imported here: a training needs no part of it

    print(plan_text(stray, options))


def main(argv):
    """Run a command line; returns the exit code: 0 done or asked to stop, 2 bad options or input, 1 anything else."""
    failure = "see its message"
    try:
        fire.Fire(dict(train=train, plan=plan, test=test, doctor=doctor), command_line(argv), name="train_low_mem.py")
        failure = ""
    except ValueError as error:
        raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
        if raised_in.parent != ROOT and ROOT / "model" not in raised_in.parents:
            raise  # a library raised it: a bug here, not a user error
        failure = str(error)
        if os.environ.get("LOCAL_RANK", "0") == "0":  # every rank raises the same error
            print(printable_lines(str(error)), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        failure = ""
        return 0  # stopped before there was anything to save
    except (RuntimeError, OSError) as error:
        failure = str(error)
        rank = f"rank {os.environ['RANK']}: " if "RANK" in os.environ else ""
        print(printable_lines(rank + failure + go_on_hint(error)), file=sys.stderr)
        LOGGER.debug("the run ends with this error", exc_info=True)
        return 1
    finally:
        stop_ranks(failure)
    return 0


if __name__ == "__main__":
    gc.freeze()  # later searches pass what was imported by
    gc.enable()
    sys.exit(main(sys.argv[1:]))
