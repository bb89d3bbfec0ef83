"""A run chooses how its models answer at its end, and what the user set is what is used."""

import json
import random
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import GenerationConfig

from model.commands import decoding, evaluation
from model.data.tokenizer import PROBE, load_tokenizer
from model.display.catalogue import Texts
from model.formats.weights import export_model
from model.generate.decoding_choice import PENALTY, ways_to_try
from model.generate.sampling import Sampling
from model.nn.decoder.network import DecoderModel
from model.nn.decoder.sizes import DecoderModelConfig
from model.nn.registry import family_of
from model.run.journal import Journal
from model.serve.answering import load_chat_model
from model.train import decoding_trial
from model.train.decoding_trial import try_ways
from scripts.merge_lora import merge
from tests.tiny import journal, refused, start, train, wait_for, write_pairs
from tests.trials import QWEN_SIZES
from train_low_mem import main

ANSWERED = dict(bleu_pairs=4, max_new_tokens=6, validation_file="many.jsonl", output_dir="run", epochs=2)


@pytest.fixture(scope="module")
def home(home):
    draw = random.Random(1)
    write_pairs(home / "many.jsonl", ["".join(draw.choices(PROBE, k=6)) for _ in range(2 * decoding_trial.ROUND)])
    return home


def with_time(words):
    """`main` of a run whose first evaluation is its best, and which may take all the time it needs for the choice."""
    (folder,) = (word.partition("=")[2] for word in words if word.startswith("--output_dir="))
    evaluation.is_better = lambda run, state, scores: state.best_loss is None
    decoding.SHARE = 1000.0
    decoding.try_ways = partial(tried_with_best, folder)
    return main(words)


def without_time(words):
    """`main` of a run that has no time for the choice."""
    decoding.LEAST_SECONDS = decoding.SHARE = 0
    return main(words)


def tried_with_best(folder, evaluation, *args):
    """`try_ways` with a model that has the weights of best/."""
    (path,) = Path(folder, "best").glob("*model.safetensors")
    best, model = load_file(path), evaluation.model
    prefix = family_of(model.config).adapter_prefix if model.lora else ""
    assert all(torch.equal(tensor, best[prefix + name]) for name, tensor in model.saved_tensors().items())
    return try_ways(evaluation, *args)


def with_a_penalty(words):
    """`with_time` where the last of all ways is chosen."""
    decoding.choose_way = lambda tried, references: (tried[-1], "sound")
    return with_time(words)


def settings(folder):
    return json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))


def test_a_run_chooses_on_its_validation_questions_and_a_longer_one_keeps_that_until_it_chooses_again(home):
    done = wait_for(start(home, 2, "decoding:0:12:real", function=with_time, **ANSWERED), home, 90)
    assert done.codes == [0, 0] and "decoding:0:12:real fires" in done.text, done.text
    (stop,) = journal(home / "run", "stop")
    told = stop["decoding"]
    assert told["questions"] == decoding_trial.ROUND and len(told["tried"]) == 9
    chosen = Sampling(**told["tried"][0]["sampling"])
    assert chosen in sum(ways_to_try(), []) and "answers: " in done.text and "64 validation questions" in done.text
    for name in ("best", "last"):
        assert settings(home / "run" / name)["chat_trainer"]["chosen_decoding"] is True
        assert load_chat_model(home / "run" / name, "cpu").sampling == chosen
        assert GenerationConfig.from_pretrained(home / "run" / name).do_sample is bool(chosen.temperature)
    kept = settings(home / "run" / "best") | dict(do_sample=True, temperature=0.3)
    (home / "run" / "best" / "generation_config.json").write_text(json.dumps(kept))
    options = ANSWERED | dict(is_keep_training=True, epochs=3)
    again = wait_for(start(home, 1, function=without_time, **options), home, 90)
    assert again.codes == [0] and "too short a run" in again.text
    assert load_chat_model(home / "run" / "last", "cpu").sampling.temperature == 0.3


def test_what_stands_against_a_choice_is_said_and_what_was_typed_is_used(home):
    typed = dict(temperature=0.7, top_k=20, top_p=0.9, repetition_penalty=1.2, output_dir="typed", epochs=1)
    done = train(home, **ANSWERED | typed)
    assert (
        done.codes == [0]
        and "drawn, temperature 0.7, top_k 20, top_p 0.9, repetition_penalty 1.2 (as typed)" in done.text
    )
    assert load_chat_model(home / "typed", "cpu").sampling == Sampling(0.7, 20, 0.9, repetition_penalty=1.2)
    few = train(home, **ANSWERED | dict(validation_file="valid.jsonl", output_dir="few", epochs=1))
    assert few.codes == [0] and "too few validation questions" in few.text
    assert load_chat_model(home / "few", "cpu").sampling == Sampling()
    assert refused(
        train(home, **ANSWERED | dict(top_p=0.9)), "belongs to a temperature above 0: type --temperature=0.7"
    )
    assert refused(train(home, **ANSWERED | dict(temperature=-2)), "must be from 0 to 100")


@pytest.mark.parametrize("value", ["hot", [1], {}, 10**400, float("nan")])
def test_strange_settings_of_a_base_are_said_as_they_stand(value):
    strange = dict(do_sample=True, temperature=value, chat_trainer=dict(repetition_penalty=value))
    said = decoding.how_text(strange, Texts("en"))
    assert said.startswith("drawn, temperature ") and "repetition_penalty" in said and len(said) < 150


@pytest.mark.parametrize("fault", ["term", "oom:9"])
def test_a_stop_or_want_of_memory_in_the_trial_leaves_a_finished_run_that_says_so(home, fault):
    options = ANSWERED | dict(epochs=1, output_dir="cut", overwrite=True)
    done = wait_for(start(home, 1, f"decoding:0:6:{fault}", function=with_time, **options), home, 90)
    assert done.codes == [0] and "time, memory or a stop ended the trial" in done.text, done.text
    (stop,) = journal(home / "cut", "stop")
    assert (stop["reason"], stop["decoding"]["why"]) == ("finished", "cut")
    assert load_chat_model(home / "cut" / "last", "cpu").sampling == Sampling()


def test_a_decoder_s_penalty_is_for_this_trainer_alone_as_transformers_would_count_the_prompt(home):
    (home / "base").mkdir()
    tokenizer = load_tokenizer(home / "model_save" / "tokenizer")
    model = DecoderModel(DecoderModelConfig(**QWEN_SIZES, vocab_size=tokenizer.vocab_size)).initialise(1)
    export_model(model, tokenizer, home / "base")
    adapter = dict(lora_rank=2, finetune_from_ckp_file="base", model=None, max_seq_len=96)
    options = ANSWERED | adapter | dict(output_dir="adapted")
    killed = wait_for(start(home, 1, "decoding:0:12:kill", function=with_a_penalty, **options), home, 90)
    assert killed.codes == [-9] and (home / "adapted" / "last").exists() and not journal(home / "adapted", "stop")
    with Journal(home / "adapted" / "metrics.jsonl") as after_a_full_disk:
        after_a_full_disk.write("stop", step=12, reason="finished", decoding=None)
    done = wait_for(start(home, function=with_a_penalty, is_keep_training=True, **options), home, 90)
    assert done.codes == [0] and "answers: drawn, temperature 1, " in done.text, done.text
    assert "answers: " not in train(home, is_keep_training=True, **options).text, "it is chosen once"
    merge(home / "adapted", home / "merged")
    assert settings(home / "merged") == settings(home / "adapted" / "best")
    said = settings(home / "adapted" / "best")
    assert said["repetition_penalty"] == 1.0 and said["chat_trainer"]["repetition_penalty"] == PENALTY
    assert load_chat_model(home / "adapted" / "last", "cpu").sampling == ways_to_try()[1][-1]
