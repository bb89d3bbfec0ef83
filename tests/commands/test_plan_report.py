import json
import os
import random
import re
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from config import MODELS
from model.commands import length_sample
from model.commands.option_values import load_config
from model.commands.plan_report import plan_text, preview, table
from model.commands.recipe import plan_options
from model.data.conversation import Conversation, Turn
from model.data.length_histogram import histogram
from model.data.packing import cut
from model.data.store_writer import column_lengths
from model.data.t5_text import Context
from model.data.token_store import Source, find_store
from model.data.tokenizer import PROBE, load_tokenizer
from model.memory.plan import NothingFits, choose_plan, predicted_peaks
from model.nn.memory_spec import count_numbers
from model.nn.t5.family import T5
from model.nn.t5.sizes import T5ModelConfig
from model.run.run_dir import TOKENIZER_DIR, TOKENS_DIR
from model.train.objectives.pairs import Pairs
from tests.parts import make_estimate, open_pairs, write_parquet
from tests.tiny import furnish, write_pairs

GIB = 2**30


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.chdir(furnish(tmp_path))
    return tmp_path


def plan(num_processes=1, vocab_size=40_960, **options):
    return preview(load_config("pretrain", options), options, num_processes, vocab_size)


@pytest.mark.parametrize(
    "pairs, tokens, vocab_size, text",
    (
        (32, 252, 40_960, "32 x 252 x 40,960 x 4 B = 1.23 GiB"),
        (2, 2048, 151_936, "2 x 2048 x 151,936 x 4 B = 2.32 GiB"),
    ),
)
def test_the_logits_of_an_ordinary_trainer_take_the_bytes_that_the_guides_give(pairs, tokens, vocab_size, text):
    values = plan(vocab_size=vocab_size, batch_size_per_gpu=pairs, max_seq_len=tokens, gpu_memory_limit_gb=20)
    assert text in table(values)


def test_the_plan_says_that_the_weights_it_was_given_are_not_there(home):
    given = dict(gpu_memory_limit_gb=20, model="small")
    assert "weights" not in table(plan(**given)).splitlines()[0]
    first = table(plan(finetune_from_ckp_file="elsewhere/best", **given)).splitlines()[0]
    assert first.split(None, 1) == ["weights", "elsewhere/best: not on this machine, so planned for --model=small"]


def test_bytes_per_packed_token_do_not_depend_on_the_batch_size(home):
    draw = random.Random(0)
    texts = ["".join(draw.choices(PROBE, k=draw.randint(4, 40))) for _ in range(6000)]
    write_pairs(home / "tail.jsonl", [*texts, "长" * 400, "长" * 400])
    given = dict(train_file="tail.jsonl", gpu_memory_limit_gb=20)
    for model, kib in (("small", 60), ("chatlm", 150)):
        counts = [plan(model=model, batch_size_per_gpu=pairs, **given)["bytes_per_token"] for pairs in (2, 8, 32)]
        assert kib * 1024 < min(counts) and max(counts) < 1.2 * min(counts), counts


def test_bytes_per_packed_token_are_counted_also_if_the_update_is_the_peak():
    for pairs, tokens in ((1, 128), (2, 128), (8, 64)):
        batch = dict(batch_size_per_gpu=pairs, gradient_accumulation_steps=1)
        values = plan(model="small", gpu_memory_limit_gb=4, max_seq_len=tokens, **batch)
        assert values["bytes_per_token"] > 60 * 1024


def test_bytes_per_packed_token_are_counted_also_for_a_small_file(home):
    values = plan(model="small", gpu_memory_limit_gb=8, train_file="train.jsonl", max_seq_len=64)
    assert values["lengths"]["pairs"] < 50 and values["bytes_per_token"] > 60 * 1024


def test_no_lever_is_shown_that_train_refuses():
    batch = dict(batch_size_per_gpu=1, gradient_accumulation_steps=1)
    values = plan(model="small", gpu_memory_limit_gb=4, max_seq_len=512, **batch)
    levers = [lever["lever"] for lever in values["levers"] if lever["lever"].startswith("micro-batch")]
    tokens, longest = values["plan"]["micro_batch_tokens"], values["lengths"]["longest"]
    assert tokens == longest and not levers
    values = plan(
        model="small", gpu_memory_limit_gb=4, max_seq_len=512, micro_batch_tokens=longest, batch_size_per_gpu=4
    )
    levers = [lever["lever"] for lever in values["levers"] if lever["lever"].startswith("micro-batch")]
    assert levers == [f"micro-batch of {2 * longest}"]
    for adamw_only in (dict(offload="optimizer"), dict(master_dtype="bf16")):
        values = plan(model="small", gpu_memory_limit_gb=8, optimizer="adamw", **adamw_only)
        assert values["levers"] and "optimizer" not in {lever["kind"] for lever in values["levers"]}


def test_the_predicted_evaluation_peak_covers_every_forward_pass():
    draw = np.random.default_rng(0)
    for pairs, longest in ((1, 256), (16, 512), (64, 512)):
        lengths = np.minimum(draw.geometric(1 / 30, (20_000, 2)) + 1, longest).astype(np.uint16)
        config = load_config("pretrain", dict(model="chatlm", batch_size_per_gpu=pairs, gpu_memory_limit_gb=20))
        shape = T5ModelConfig(**MODELS["chatlm"], vocab_size=40_960)
        estimate = make_estimate(config, shape, torch.bfloat16, histogram(lengths), pairs)
        chosen = choose_plan(plan_options(config), estimate, 19 * GIB)
        for part in cut(np.arange(2000), lengths[:2000], chosen.micro_batch_tokens):
            own = make_estimate(config, shape, torch.bfloat16, histogram(lengths[part]), len(part))
            needed = own.peaks(int(lengths[part].sum()), *chosen.batching[1:])["evaluation"]
            assert needed <= predicted_peaks(estimate, chosen, 19 * GIB)["evaluation"]


def test_cuda_graphs_are_counted_in_every_phase_after_their_recording(home):
    given = dict(model="small", gpu_memory_limit_gb=20, max_seq_len=128, batch_size_per_gpu=32)
    with_graphs, without = plan(compile="True", **given), plan(compile="False", **given)
    assert with_graphs["plan"]["graphs"] and not without["plan"]["graphs"]
    held = {name: with_graphs["phases"][name] - peak for name, peak in without["phases"].items()}
    assert held["step"] == held["load"] == 0 < held["save"] == held["evaluation"] == held["generation"]


def test_recordings_are_deleted_for_evaluations_that_need_their_memory(home):
    given = dict(model="small", max_seq_len=128, batch_size_per_gpu=64, compile="True")
    for limit_gb in (20, 3):
        planned = plan(gpu_memory_limit_gb=limit_gb, **given)
        evaluation, save = (planned["phases"][name] for name in ("evaluation", "save"))
        assert planned["plan"]["graphs"] and max(evaluation, save) <= limit_gb * GIB
        assert (evaluation > save) == (limit_gb == 20), "a save keeps the graphs"


def test_the_case_of_the_second_guide_fits_its_card_in_one_forward():
    values = plan(3, model="chatlm", batch_size_per_gpu=32, max_seq_len=256, gpu_memory_limit_gb=19.58)
    assert values["parameters"] == 196_648_704
    assert values["forwards"] == 1 and not values["plan"]["gradient_checkpointing"]
    assert max(values["phases"].values()) < 19.58 * GIB
    assert {lever["lever"] for lever in values["levers"]} >= {"optimizer adafactor", "activation checkpointing True"}


def test_a_model_too_large_for_one_pair_is_refused_with_its_bytes():
    with pytest.raises(NothingFits, match="optimizer 1.47.*--optimizer=adafactor"):
        plan(model="chatlm", max_seq_len=512, gpu_memory_limit_gb=4, optimizer="adamw_rms")
    for optimizer in ("muon", "adafactor"):
        values = plan(model="chatlm", max_seq_len=512, gpu_memory_limit_gb=4, optimizer=optimizer)
        assert values["plan"]["predicted_peak_bytes"] < 4 * GIB


def test_the_message_for_a_limit_that_is_too_low_gives_one_that_is_enough(capsys):
    limit = dict(vocab_size="500", num_processes="1", json="True", gpu_memory_limit_gb="0.7")
    with pytest.raises(NothingFits):
        plan_text((), dict(limit))
    refused = json.loads(capsys.readouterr().out)
    assert not refused["fits"]
    (enough,) = re.findall("--gpu_memory_limit_gb=([0-9.]+) or more", refused["refused"])
    assert json.loads(plan_text((), limit | dict(gpu_memory_limit_gb=enough)))["fits"]


def test_a_phase_that_does_not_fit_is_reported_with_what_to_type(capsys):
    words = dict(model="chatlm", vocab_size="40960", num_processes="1", gpu_memory_limit_gb="4", max_seq_len="1024")
    words |= dict(max_new_tokens="24000")
    with pytest.raises(NothingFits, match="^generation needs 3.58 GiB and 3.41 GiB are there: type --bleu_pairs=0"):
        plan_text((), dict(words))
    shown = capsys.readouterr().out
    assert re.search(r"^peak: generation +3.58 GiB, does not fit$", shown, re.MULTILINE)
    assert re.search(r"^with activation checkpointing True .* does not fit", shown, re.MULTILINE)
    with pytest.raises(NothingFits):
        plan_text((), words | dict(json="True"))
    values = json.loads(capsys.readouterr().out)
    assert not values["fits"] and values["refused"].startswith("generation") and values["plan"]["answers"] == 1
    without = json.loads(plan_text((), words | dict(bleu_pairs="0", json="True")))
    assert without["fits"] and "generation" not in without["phases"]


def test_an_unknown_vocabulary_size_is_refused_with_the_option_to_type(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ValueError, match="train_tokenizer.py FILES --output_dir model_save/tokenizer .*, or type --vocab_size=N"
    ):
        plan(vocab_size=0)


def test_lengths_are_sampled_until_the_store_exists_and_then_counted(home):
    options = dict(model="shape.json", train_file="train.jsonl", max_seq_len=32, gpu_memory_limit_gb=1)
    sampled = plan(vocab_size=0, **options)
    assert re.search(
        r"^pairs +45: 44 sampled and one of the greatest length; .* at most 64$", table(sampled), re.MULTILINE
    )
    tokenizer = load_tokenizer(TOKENIZER_DIR)
    assert find_store(Source(("train.jsonl",), Pairs(), tokenizer, 32), TOKENS_DIR) is None
    store = open_pairs("train.jsonl", tokenizer, 32, TOKENS_DIR)
    values = plan(vocab_size=0, **options)
    assert "40 of 64 pairs; warm-up 3" in table(plan(vocab_size=0, **options, epochs=40))
    with pytest.raises(ValueError, match="warm-up of 28 steps must be shorter than the run of 28: .*--warmup_steps=2$"):
        plan(vocab_size=0, **options, epochs=40, warmup_steps=28)
    stored = load_config("pretrain", options | dict(warmup_steps=1000))
    assert "the warm-up of 1000 steps" in table(preview(stored, (), 1)), "of a resumed run"
    counted = values["lengths"]
    assert counted["source"].startswith("counted in ")
    assert (counted["pairs"], counted["longest"]) == (44, int(store.lengths.sum(axis=1).max()))
    encoded = Pairs().encode(list(Pairs().read("train.jsonl", ("", ""), Counter())), tokenizer, 32)
    assert (column_lengths(encoded) == store.lengths).all()


def test_the_number_of_steps_is_not_shown_if_the_pairs_are_not_counted(home, monkeypatch):
    monkeypatch.setattr(length_sample, "SAMPLED_ROWS", 40)
    for options in (dict(train_file="train.jsonl"), dict(train_file="nowhere.jsonl")):
        values = plan(model="shape.json", max_seq_len=32, gpu_memory_limit_gb=1, **options)
        assert values["steps"] == dict(pairs=64, count=None, warmup=None, problem="")
        assert "known once the data is tokenised" in table(values)


def test_pairs_with_an_empty_side_are_not_counted_as_steps(home):
    given = dict(model="shape.json", max_seq_len=32, batch_size_per_gpu=2, gradient_accumulation_steps=1, epochs=1)
    write_pairs(home / "holes.jsonl", ["ab", "cd", "", "ef", "gh", "ij"])
    write_pairs(home / "empty.jsonl", ["", ""])
    for name, steps in (("holes.jsonl", 1), ("empty.jsonl", 0)):
        assert plan(vocab_size=0, train_file=name, **given)["steps"]["count"] == steps


@pytest.mark.parametrize("name", ["many.jsonl", os.fsdecode(b"many\xff.parquet")], ids=["jsonl", "name not UTF-8"])
def test_the_predicted_disk_space_includes_the_token_store(home, monkeypatch, name):
    monkeypatch.setattr(length_sample, "SAMPLED_ROWS", 500)
    draw = random.Random(0)
    pairs = [["".join(draw.choices(PROBE, k=30)) for _ in range(6000)] for _ in range(2)]
    write_pairs(home / "many.jsonl", [text for pair in zip(*pairs, strict=True) for text in pair])
    with open(home / os.fsdecode(b"many\xff.parquet"), "wb") as file:
        pq.write_table(pa.table(dict(zip(("prompt", "response"), pairs, strict=True))), file)
    given = dict(model="shape.json", train_file=name, max_seq_len=64)
    before = plan(vocab_size=0, **given)["host"]["disk_bytes"]
    store = open_pairs(name, load_tokenizer(TOKENIZER_DIR), 64, TOKENS_DIR)
    written = sum(path.stat().st_size for path in store.directory.iterdir())
    after = plan(vocab_size=0, **given)["host"]["disk_bytes"]
    assert written <= before - after < 1.7 * written


def test_the_dtype_is_that_of_a_training_on_this_machine(home, monkeypatch):
    given = dict(model="shape.json", train_file="train.jsonl", max_seq_len=32)
    assert plan(mixed_precision="bf16", **given)["dtype"] == "bfloat16"
    assert plan(gpu_memory_limit_gb=4, **given)["dtype"] == "bfloat16", "the GPU of another machine"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    assert plan(gpu_memory_limit_gb=4, **given)["dtype"] == "float32", "the GPU has no bf16"


def test_without_a_gpu_the_plan_is_for_the_cpu(home):
    values = plan(vocab_size=0, model="shape.json", train_file="train.jsonl", max_seq_len=32)
    assert values["host"]["rank_bytes"] > max(values["phases"].values()), "the model is in host memory"
    assert values["machine"]["memory_bytes"] is None and values["dtype"] == "float32" and values["levers"] == []
    assert "no GPU" in table(values)


def test_the_options_of_plan_are_checked_like_those_of_train(home):
    words = dict(gpu_memory_limit_gb="8", model="tiny", vocab_size="500", num_processes="2", json="True")
    values = json.loads(plan_text((), dict(words)))
    assert values["machine"]["num_processes"] == 2
    assert values["parameters"] == count_numbers(T5, T5ModelConfig(**MODELS["tiny"], vocab_size=500)).weights
    with pytest.raises(ValueError, match="--batch_size_per_gp: did you mean --batch_size_per_gpu"):
        plan_text((), dict(words, batch_size_per_gp="3"))
    with pytest.raises(ValueError, match="^--vocab_size=-5: must be at least 0"):
        plan_text((), dict(words, vocab_size="-5"))
    with pytest.raises(ValueError, match="--num_processes=two: this option takes a whole number"):
        plan_text((), dict(words, num_processes="two"))


def test_the_expected_time_is_said_for_a_named_card_and_how_to_name_one_is_said_else(home):
    text = table(preview(load_config("pretrain", dict(max_steps=1000)), (), 2, 8000, "rtx 4090"))
    assert re.search(r"expected time +about [\dhms ]+ for 1,000 steps, [\d.]+ ms a step on one RTX 4090", text)
    assert "22.52 GiB for the allocator" in text, "the card's memory less that of CUDA and NCCL"
    assert "other choices" in text and "A chunk is the targets whose logits exist at once" in text
    assert "--gpu=NAME" in table(plan()), "this machine has no GPU that is known"
    with pytest.raises(ValueError, match="--gpu=RTX: choose one of H200, "):
        plan_text((), dict(gpu="RTX", vocab_size=8000))


def test_the_pairs_of_a_long_file_are_estimated_from_its_texts_in_pairs_and_in_dialogues(tmp_path):
    path = tmp_path / "long.jsonl"
    path.write_text("x" * 4_000_000)
    pairs = [("问" * 10, "答" * 10, None)] * length_sample.SAMPLED_ROWS
    turns = [(Conversation([Turn("user", "问" * 10), Turn("assistant", "答" * 10)]),)] * length_sample.SAMPLED_ROWS
    estimates = [length_sample._estimated_pairs(path, rows) for rows in (pairs, turns)]
    assert 60_000 < estimates[0] == estimates[1] < 70_000


def test_a_plan_for_thousands_of_files_reads_few_rows_of_each():
    assert [length_sample.rows_of_each(count) for count in (1, 20, 100)] == [20_000, 1000, 1000]
    assert all(count * length_sample.rows_of_each(count) <= 100_000 for count in (101, 1000, 5000))
    assert length_sample.rows_of_each(20_000) == 20


def test_a_parquet_whose_dialogues_all_begin_with_what_is_not_learnt_is_estimated(tmp_path):
    path = write_parquet(tmp_path / "long.parquet", [("问", "答")] * 9)
    turns = [Turn("user", "问"), Turn("assistant", "答"), Turn("user", "问")]
    assert length_sample._estimated_pairs(path, [("问", "答", Context(turns, 2))]) == 9
