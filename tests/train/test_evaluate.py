"""What an evaluation says of a model, on any number of ranks."""

import json
from pathlib import Path

import pytest
import torch

from model.data.token_store import read_store
from model.data.tokenizer import load_tokenizer
from model.runtime.distributed import ALONE, start_ranks, stop_ranks
from model.train.evaluate import NUM_SAMPLES, SAMPLE_CHARACTERS, Evaluation, measure, samples_of
from tests.parts import PLAN, evaluation_of, examples_in, examples_of, make_model
from tests.ranks import run_ranks


def measured(ranks, store_dir, tokenizer_dir):
    """(Figures, answers) of 5 questions to a model."""
    store, tokenizer = read_store(Path(store_dir)), load_tokenizer(tokenizer_dir)
    model = make_model(tokenizer.vocab_size)
    with torch.no_grad():
        model.shared.weight[tokenizer.eos_id].mul_(4)
    return measure(Evaluation(ranks, model, examples_in(store, tokenizer.pad_id), tokenizer, 5, 12), PLAN)


def measure_on_ranks(*directories):
    ranks = start_ranks("gloo", 60)
    figures, answers = measured(ranks, *directories)
    if ranks.is_main:
        Path("figures.json").write_text(json.dumps([figures, [vars(answer) for answer in answers]]))
    stop_ranks("")


def test_two_ranks_give_the_figures_and_the_answers_of_one(store, tokenizer, tmp_path):
    directories = str(store.directory), str(tokenizer.directory)
    done = run_ranks(2, measure_on_ranks, *directories, folder=tmp_path)
    assert done.codes == [0, 0], done.text
    figures, answers = measured(ALONE, *directories)
    of_ranks, answers_of_ranks = json.loads((tmp_path / "figures.json").read_text())
    assert answers_of_ranks == [vars(answer) for answer in answers] and len(answers) == 5
    del figures["answer_seconds"], of_ranks["answer_seconds"]
    assert of_ranks == pytest.approx(figures, rel=1e-6)
    assert {"loops", "ended", "length_ratio", "distinct_2", "nats_per_char", "bleu", "chrf"} <= figures.keys()


def test_nats_a_character_are_those_of_the_responses_and_their_eos(model, store, tokenizer):
    figures, answers = measure(evaluation_of(model, store, tokenizer), PLAN)
    _, responses = zip(*examples_of(store, range(len(store))), strict=True)
    characters = sum(len(tokenizer.decode(response)) for response in responses)
    assert figures["nats_per_char"] == pytest.approx(figures["loss"] * sum(map(len, responses)) / characters)
    assert answers == []


def test_samples_are_the_first_answers_and_a_long_one_is_cut(model, store, tokenizer):
    _, answers = measure(evaluation_of(model, store, tokenizer, num_answers=5, max_new_tokens=2), PLAN)
    samples = samples_of(answers)
    assert len(samples) == NUM_SAMPLES and samples[0]["question"] == answers[0].question
    long = samples_of([type(answers[0])(0, "q", "a" * 1000, "r", True, False)])[0]["answer"]
    assert long == "a" * SAMPLE_CHARACTERS + "…"
