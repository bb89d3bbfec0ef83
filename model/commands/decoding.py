"""Chooses at the end of a run how its exported models answer: on validation questions, in a small share of its time."""

import json
import logging
import time
from dataclasses import asdict

from model.commands.exporting import DECODING, chosen_settings, is_typed
from model.display.catalogue import texts_here
from model.display.durations import spent_by
from model.formats.adapters import read_adapter
from model.formats.carried import CHOSEN, GENERATION_FILE, carried_values, record_of, with_settings
from model.formats.weights import LoadedWeights, load_into, load_weights
from model.generate.decoding_choice import choose_way, ways_to_try
from model.memory.plan import MemoryPlan
from model.run.journal import read_journal
from model.run.run_dir import is_exported
from model.runtime.atomic_io import write_file
from model.runtime.json_stream import read_object
from model.train.decoding_trial import ROUND, try_ways

LOGGER = logging.getLogger("chat_trainer")
SHARE = 0.03  # of the run's time that the choice may take
LEAST_SECONDS, MOST_SECONDS = 5, 120  # that it may take however short or long the run was: other ranks have ended
DRAWING = 1.5  # time of answers that are drawn on a CPU, to that of the likeliest tokens
GPU_SLOTS = 512  # answers that a GPU generates about as fast as a tenth of them


def choose_decoding(run, state):
    """What the journal says of how the exported models answer, as a dict, and None elsewhere than on the main rank.

    Unless it is decided already, it is chosen with the weights of best/, which replace the model's, and written to
    best/ and last/. `why` is `sound`, `short` or `least` (model/generate/decoding_choice.py) if it was, else says what
    stood against it. None too for a run without answers or best/. No other rank is needed, and nothing is raised: what
    goes wrong leaves the files as they are.
    """
    if not run.ranks.is_main or not run.recipe.num_answers or not is_exported(run.dir / "best"):
        return None
    started = time.monotonic()
    try:
        why, values = why_not(run), {}
        if not why:
            why, values = _choose(run, state)
    except (OSError, RuntimeError, ValueError, MemoryError) as error:  # the run is whole without it
        LOGGER.warning(texts_here()("no_decoding", error=error))
        why, values = "failed", {}
    return dict(why=why, seconds=time.monotonic() - started) | values


def why_not(run):
    """Why there is nothing to choose: `typed`, `base`, `few`; "" if there is."""
    if any(is_typed(run.config, name) for name in DECODING):
        return "typed"
    base = carried_values(run.dir / "base", GENERATION_FILE) or {}
    if base.get("do_sample") and not record_of(base).get(CHOSEN):
        return "base"
    return "few" if len(run.evaluation.examples) < ROUND else ""


def _choose(run, state):
    """(why, what else the journal says) of a choice."""
    ways = ways_to_try(run.config.no_repeat_ngram_size)
    lines = read_journal(run.dir / "metrics.jsonl")
    seconds = min(max(SHARE * sum(spent_by(lines).values()), LEAST_SECONDS), MOST_SECONDS)
    plan, on_gpu = MemoryPlan(**state.plan), run.ranks.device.type == "cuda"
    if seconds_of_round(run, lines, plan, len(ways[0])) > seconds:
        return "brief", {}
    _take_best(run, state)
    result = try_ways(run.evaluation, ways, GPU_SLOTS if on_gpu else plan.answers, seconds, state.step)
    if result is None:
        return "cut", {}
    tried, references, asked = result
    chosen, why = choose_way(tried, references)
    settings = chosen_settings(run, chosen.sampling)
    del settings["max_new_tokens"]
    for name in ("best", "last"):
        _write_settings(run.dir / name / GENERATION_FILE, settings)
    return why, dict(questions=asked, tried=[asdict(one) for one in (chosen, *tried)])


def seconds_of_round(run, lines, plan, num_ways):
    """Seconds that the first round of `try_ways` takes at least, as the answers of the run's evaluations took."""
    known = [line["answer_seconds"] for line in lines if line["kind"] == "eval" and line.get("answer_seconds")]
    answers = -(-run.recipe.num_answers // run.ranks.world_size)
    if not known:
        return float("inf")
    if run.ranks.device.type == "cuda":
        return known[-1] / -(-answers // plan.answers) * -(-ROUND * num_ways // GPU_SLOTS)
    return DRAWING * known[-1] / answers * ROUND * num_ways


def _take_best(run, state):
    """Give the model the weights of best/ if it has others."""
    if state.best_step == state.step and run.optimizer.average is None:
        return
    best = run.dir / "best"
    load_into(run.model, LoadedWeights(read_adapter(best).tensors) if run.model.lora else load_weights(best), best)


def _write_settings(path, settings):
    """Write `settings` into an export's generation_config.json, if there is one, whole."""
    if path.is_file():
        values = with_settings(read_object(path), settings)
        write_file(path, (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode())


def decoding_line(run, decoding):
    """How the exported models answer and why, in words, of what `choose_decoding` gives; "" for None."""
    if decoding is None:
        return ""
    text = texts_here()
    how = how_text(carried_values(run.dir / "best", GENERATION_FILE) or {}, text)
    figures = ""
    if tried := decoding.get("tried"):
        shown = dict(chosen=tried[0], greedy=tried[1])
        figures = text("decoding.figures", count=decoding["questions"], **{
            f"{name}_{figure}": one[figure] for name, one in shown.items() for figure in ("loops", "ended", "chrf")
        })  # fmt: skip
    return text("decoding", how=how, why=text(f"decoding.{decoding['why']}"), figures=figures)


def how_text(values, text):
    """How the dict in a generation_config.json says to choose tokens, in words."""
    values = values | record_of(values)
    names = ("temperature", "top_k", "top_p", "min_p") if values.get("do_sample") else ()
    names += "repetition_penalty", "no_repeat_ngram_size"
    off = dict(top_k=0, top_p=1, min_p=0, repetition_penalty=1, no_repeat_ngram_size=0)
    said = [f"{name} {_shown(values[name])}" for name in names if values.get(name) not in (None, off.get(name))]
    return text("comma").join([text("decoding.drawn" if values.get("do_sample") else "decoding.greedy"), *said])


def _shown(value):
    """A setting as text; a base's file may hold anything."""
    return f"{value:g}" if isinstance(value, float) else f"{value!r:.40}"
