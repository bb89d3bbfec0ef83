"""The story of a run: options, ranks, data, model, plan, steps; evaluation and checkpoints between them.

accelerate launch --multi_gpu --num_processes 3 ./train_low_mem.py train --is_keep_training=True
python train_low_mem.py train|test [--any_field=value …]
"""

import hashlib
import logging
import os
import sys
import traceback
from dataclasses import asdict, replace
from pathlib import Path

from model.watch import saving, stop_asked, training_begins, watch_signals

if __name__ == "__main__":
    watch_signals()  # before the seconds that torch takes to load
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # before torch: against fragmentation
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA: what --deterministic needs
if os.getloadavg()[0] > os.cpu_count():  # a busy machine: threads that spin while they wait starve each other
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a run reads local files only

import accelerate
import fire
import torch
import transformers
from fire.decorators import SetParseFn

from model.dataset import describe_store
from model.durable import remove_drafts
from model.evaluate import answer_pairs, evaluate_loss, score
from model.export import as_hugging_face
from model.memory import memory_cap, peak_memory
from model.plots import plot_run
from model.prepare import prepare_run, prepare_test
from model.ranks import agree, from_main, start_ranks, stop_ranks, vote
from model.report import Journal, Progress, epoch_line, open_log, progress_note, train_line
from model.run_dir import admit, cut_sample_ids, only_writer, read_request, write_json
from model.saver import Saver, export_aloud
from model.step import train_steps

LOGGER = logging.getLogger("chat_trainer")
LOGS_DIR = "logs"
OURS = (Path(__file__).resolve().parent, Path(__file__).resolve().parent / "model")


@SetParseFn(str)
def train(*stray, **options):
    """Train a model, or go on with one: every field of TrainConfig is an option (README has the table)."""
    request = read_request(stray, options)
    watch_signals()
    config = request.config
    ranks = start_ranks(config.backend, config.ddp_timeout_s)
    agree(ranks, "the options", asdict(config))
    if ranks.is_main:
        open_log(LOGS_DIR, request.preset)
    admitted = from_main(ranks, admit, config.output_dir, request.keep_training, request.overwrite)
    run, state, plan = prepare_run(ranks, config, request.given, bool(admitted))
    if state.pairs_seen >= run.course.total_pairs and state.evaluated_step == state.step:
        say(ranks, f"{run.dir} is finished: {config.epochs} epochs done; raise --epochs to train longer")
        return
    with only_writer(ranks, run.dir, admitted, request.overwrite, run.tokenizer.directory):
        if vote(ranks, stop_asked())[0]:
            raise KeyboardInterrupt
        training_begins()
        with Journal(run.dir / "metrics.jsonl" if ranks.is_main else None) as journal:
            begin(run, journal, request, state, plan)
            finish(run, journal, *train_to_the_end(run, journal, state, plan))


def train_to_the_end(run, journal, state, plan):
    """Train, evaluate and save from `state` on.

    Returns the last state, why it ended (finished or asked), and why its checkpoint failed, where it did.
    """
    samples = run.dir / f"samples_rank{run.ranks.rank}.jsonl" if run.config.log_sample_ids else None
    with Journal(samples) as samples, Saver(run.ranks, run.dir, run.config.keep_latest_n_ckp, journal) as saver:
        state, reason = train_and_save(run, journal, samples, saver, state, plan)
        with saving():
            saver.join()
    return state, reason, saver.failure


def train_and_save(run, journal, samples, saver, state, plan):
    """The steps, and what happens between them; returns the last state and why it ended."""
    config, course = run.config, run.course
    recent, note, saved_at = [], "", None
    state, stop = evaluate_if_due(run, journal, state, plan)
    steps = train_steps(
        run.ranks, run.model, run.optimizer, run.train, plan, config, course, state.step, state.pairs_seen
    )  # fmt: skip
    with Progress("training", total_steps(run, state), done=state.step, shown=run.ranks.is_main) as progress:
        while not stop and (result := next(steps, None)):
            state, stop = state.after(result), result.stop
            recent.append(result)
            write_events(run, journal, samples, result)
            last = result.ends_epoch or stop or result.pairs_seen == course.total_pairs
            if last or result.step % config.logging_steps == 0:
                note = log_steps(run, journal, recent)
                recent.clear()
            progress.update(result.step, note)
            if not stop:
                state, stop = evaluate_if_due(run, journal, state, result.plan)
            saved_at = result.clock_seconds if saved_at is None else saved_at
            late = result.clock_seconds - saved_at >= config.save_seconds
            if last or stop or late or result.step % config.save_steps == 0:
                saver.save(state, run.model, run.optimizer)
                saved_at = result.clock_seconds
    return state, "asked" if stop else "finished"


def begin(run, journal, request, state, plan):
    """Write down what runs, and from where."""
    config, ranks = run.config, run.ranks
    plain = asdict(config)
    if ranks.is_main:
        remove_drafts(run.dir, run.dir / "checkpoints")
        write_json(run.dir / "config.json", dict(preset=request.preset, given=request.given, config=plain))
        write_json(run.dir / "plan.json", asdict(plan))
        cut_sample_ids(run.dir, state.step)
    journal.write(
        "start", preset=request.preset, config_hash=hashlib.sha256(repr(plain).encode()).hexdigest()[:16],
        world=ranks.world_size, backend=ranks.backend, device=device_name(ranks.device),
        dtype=str(run.model.compute_dtype).removeprefix("torch."), versions=versions(),
        tokenizer_fingerprint=run.tokenizer.fingerprint, parameters=sum(p.numel() for p in run.model.parameters()),
        global_batch=run.course.global_batch, total_pairs=run.course.total_pairs, epochs=config.epochs,
        total_steps=total_steps(run, state),
    )  # fmt: skip
    journal.write("resume", step=state.step, pairs_seen=state.pairs_seen)
    attention = "Triton kernels" if run.model.uses_kernels else "plain attention"
    where = f"{ranks.world_size} x {device_name(ranks.device)}, backend {ranks.backend}"
    steps = f"{total_steps(run, state)} steps of {run.course.global_batch} pairs"
    say(ranks, f"{steps} on {where}, {run.model.compute_dtype}, {attention}")


def total_steps(run, state):
    """Number of the run's last step when every step from now on has the present global batch."""
    num_pairs, batch = len(run.train), run.course.global_batch
    left = run.course.total_pairs - state.pairs_seen
    in_this_epoch = left % num_pairs
    return state.step + -(-in_this_epoch // batch) + (left // num_pairs) * -(-num_pairs // batch)


def write_events(run, journal, samples, result):
    """Journal what went wrong on the way to a step, and its example ids where they are wanted."""
    for kind, values in result.events:
        journal.write(kind, **values)
        say(run.ranks, f"{kind}: {values}")
    samples.write("sample", step=result.step, epoch=result.epoch, ids=result.ids)


def log_steps(run, journal, results):
    """Write one train line over `results`, the steps since the last one; returns the progress line's note."""
    peak_bytes, reserved_bytes, host_rss_bytes = peak_memory(run.ranks.device)
    done = [result for result in results if not result.skipped]
    seconds, tokens = sum(r.step_seconds for r in results), sum(r.tokens for r in results)
    target_tokens = sum(r.target_tokens for r in done)
    loss = sum(float(r.loss) * r.target_tokens for r in done) / target_tokens if done else float("nan")
    last = results[-1]
    values = dict(
        step=last.step, epoch=last.epoch, loss=loss, learn_rate=last.learn_rate, grad_norm=float(last.grad_norm),
        pairs_seen=last.pairs_seen, target_tokens=target_tokens, tokens=tokens, tokens_per_second=tokens / seconds,
        step_seconds=seconds / len(results), micro_batches=sum(r.micro_batches for r in results) / len(results),
        peak_bytes=peak_bytes, reserved_bytes=reserved_bytes, host_rss_bytes=host_rss_bytes,
        data_wait_seconds=sum(r.data_wait_seconds for r in results) / len(results),
    )  # fmt: skip
    journal.write("train", **values)
    on_gpu = run.ranks.device.type == "cuda"
    say(run.ranks, train_line({k: v for k, v in values.items() if on_gpu or k not in ("peak_bytes", "reserved_bytes")}))
    return progress_note(
        loss, tokens / seconds, reserved_bytes, memory_cap(run.ranks.device, run.config.gpu_memory_limit_gb)
    )


def evaluate_if_due(run, journal, state, plan):
    """(state, stop asked): evaluated at the end of each epoch and every eval_steps, best/ kept by validation loss."""
    config, ranks = run.config, run.ranks
    at_epoch_end = state.pairs_seen % len(run.train) == 0 or state.pairs_seen >= run.course.total_pairs
    due = at_epoch_end or (config.eval_steps and state.step % config.eval_steps == 0)
    if state.step == state.evaluated_step or not due:
        return state, False
    scores = measure(run, run.validation, plan, config.bleu_pairs, state.step)
    if scores is None:
        return state, True
    journal.write("eval", step=state.step, epoch=state.pairs_seen / len(run.train), **scores)
    state = replace(state, evaluated_step=state.step)
    better = state.best_loss is None or scores["loss"] < state.best_loss
    refused = export_aloud(run.model, run.tokenizer, run.dir / "best") if better and ranks.is_main else ""
    stop, refused = vote(ranks, stop_asked(), bool(refused))
    if better and not refused:  # else the next evaluation tries again
        state = replace(state, best_loss=scores["loss"], best_step=state.step)
    say(ranks, epoch_line(dict(
        epoch=state.pairs_seen / len(run.train), step=state.step, val_loss=scores["loss"],
        cur_bleu4=scores.get("bleu"), cur_chrf=scores.get("chrf"),
        best_val_loss=state.best_loss, best_step=state.best_step,
    )))  # fmt: skip
    return state, bool(stop)


def measure(run, store, plan, num_answers, step):
    """Loss, and BLEU and chrF of `num_answers` generated answers, on `store`; None when a stop was asked for."""
    loss = evaluate_loss(run.ranks, run.model, store, plan, run.tokenizer.pad_id, step)
    if loss is None or not num_answers:
        return loss if loss is None else dict(loss=loss)
    stock = as_hugging_face(run.model, run.tokenizer)
    answers = answer_pairs(
        run.ranks, stock, store, run.tokenizer, num_answers, run.config.max_new_tokens, run.model.compute_dtype, step
    )
    return None if answers is None else dict(loss=loss, **score(answers))


def finish(run, journal, state, reason, failure):
    """Leave last/, the final word and the curves; raises RuntimeError when the run's end is not on the disk."""
    if run.ranks.is_main:
        with saving():
            failure = failure or export_aloud(run.model, run.tokenizer, run.dir / "last")
    journal.write("stop", step=state.step, reason=reason)
    if failure:
        raise RuntimeError(
            f"the run's end is not on the disk ({failure}): mend that, then type --is_keep_training=True"
        )
    go_on = "" if reason == "finished" else "; go on with --is_keep_training=True"
    say(run.ranks, f"{reason} at step {state.step}, {state.pairs_seen} pairs seen{go_on}")
    if run.ranks.is_main and reason == "finished":  # who asked for a stop does not wait for a drawing
        plot_run(run.dir)


@SetParseFn(str)
def test(*stray, **options):
    """Loss, BLEU and chrF of a run's best/ model on test_file."""
    request = read_request(stray, options, keep_training="auto")
    watch_signals()
    ranks = start_ranks(request.config.backend, request.config.ddp_timeout_s)
    if ranks.is_main:
        open_log(LOGS_DIR, request.preset)
    run, plan = prepare_test(ranks, request.config)
    scores = measure(run, run.validation, plan, request.config.bleu_pairs, 0)
    if scores:
        say(ranks, f"test {describe_store(run.validation)}")
        say(ranks, f"test {run.dir / 'best'}: " + ", ".join(f"{name} {value:.4f}" for name, value in scores.items()))


def say(ranks, text):
    """Log one line, on the main rank."""
    if ranks.is_main:
        LOGGER.info(text)


def device_name(device):
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({torch.get_num_threads()} threads)"


def versions():
    python = ".".join(map(str, sys.version_info[:3]))
    libraries = {module.__name__: module.__version__ for module in (torch, transformers, accelerate)}
    return dict(python=python, cuda=torch.version.cuda, **libraries)


def main(argv):
    """Run a command line; returns its exit code: 0 done or asked to stop, 2 bad options or input, 1 the rest."""
    words = [word for word in argv if not word.startswith(("--local_rank", "--local-rank"))]
    if not words or (words[0].startswith("--") and words[0] != "--help"):
        words.insert(0, "train")
    failure = "its message tells why"
    try:
        fire.Fire(dict(train=train, test=test), words, name="train_low_mem.py")
        failure = ""
    except ValueError as error:
        if Path(traceback.extract_tb(error.__traceback__)[-1].filename).parent not in OURS:
            raise  # a library's: our mistake, not the user's
        if os.environ.get("LOCAL_RANK", "0") == "0":  # every rank finds the same fault in what the user gave
            print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        failure = ""
        return 0  # asked to stop before there was anything to save
    except (RuntimeError, OSError) as error:
        failure = str(error)
        print(f"rank {os.environ.get('RANK', 0)}: {error}", file=sys.stderr)
        logging.getLogger("chat_trainer").debug("", exc_info=True)
        return 1
    finally:
        stop_ranks(failure)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
