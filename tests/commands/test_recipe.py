from dataclasses import replace

import torch

from config import MODELS
from model.commands import machine
from model.commands.doctor import model_rows
from model.commands.machine import Machine, machine_of
from model.commands.option_values import load_config
from model.commands.plan_report import planned_recipe
from model.commands.recipe import CPU_ANSWERS, answers_wanted
from model.commands.setup import prepare_run
from model.memory.estimate import Answers
from model.nn.gradient_parts import LEAST_NUMBERS
from model.nn.t5.sizes import T5ModelConfig
from model.runtime.distributed import ALONE, start_ranks, stop_ranks
from model.train.reduction import PIECE_NUMBERS, PIECES_AT_ONCE, _buffers, buffer_bytes
from tests.parts import make_config, make_spec
from tests.ranks import run_ranks
from tests.tiny import OPTIONS, SHORT, train

CHATLM = T5ModelConfig(**MODELS["chatlm"], vocab_size=40_960)


def machine_of_unlike_gpus():
    """Ranks with GPUs of different launch speeds; returns 0 if their Machine has the lowest, else 3."""
    ranks = start_ranks("gloo", 60)
    machine.launch_tokens_here = lambda: 9000 - 1000 * ranks.rank
    found = machine_of(ranks)
    stop_ranks()
    return 0 if found == Machine(2, "cpu", False, 8000) else 3


def test_all_ranks_use_the_lowest_launch_speed_of_their_gpus(tmp_path):
    done = run_ranks(2, machine_of_unlike_gpus, folder=tmp_path)
    assert done.codes == [0, 0], done.text


def test_a_sum_in_bf16_holds_no_more_than_what_is_trained_takes():
    adapter, whole = (
        make_spec(make_config(reduce_dtype="bf16", lora_rank=rank), CHATLM, torch.bfloat16) for rank in (4, 0)
    )
    most = PIECE_NUMBERS * PIECES_AT_ONCE
    assert adapter.trained < LEAST_NUMBERS
    assert 0 < adapter.trained < most < whole.trained
    assert (adapter.sum_bytes, whole.sum_bytes) == (4 * adapter.trained, 4 * most)
    assert make_spec(make_config(), CHATLM, torch.bfloat16).sum_bytes == 0
    for numbers in (LEAST_NUMBERS - 2, LEAST_NUMBERS, PIECE_NUMBERS + 2):
        buffers = _buffers(2, numbers, torch.device("meta"), torch.bfloat16)
        assert buffer_bytes(numbers) == sum(buffer.nbytes for pair in buffers for buffer in pair)


def test_a_rank_wants_its_share_of_the_answers_together_and_a_cpu_not_too_many():
    one, three = Machine(1, "cuda"), Machine(3, "cuda")
    assert answers_wanted(1000, 30, one) == Answers(1000, 30) and answers_wanted(1000, 30, three) == Answers(334, 30)
    assert [answers_wanted(1000, 30, Machine(number)).count for number in (3, 100)] == [CPU_ANSWERS, 10]
    assert answers_wanted(0, 30, one).count == 1


def recipes(home, **options):
    """The Recipes that train, plan and doctor make of the same options."""
    config = load_config("pretrain", OPTIONS | dict(output_dir="equal", epochs=1, bleu_pairs=2) | options)
    run, _, _ = prepare_run(ALONE, config, frozenset(options), resumed=False)
    examined, _, _ = model_rows(config, frozenset(options), overwrite=False)
    return run.recipe, planned_recipe(config, frozenset(options), Machine())[0], examined


def test_equal_facts_give_train_plan_and_doctor_an_equal_recipe(home, monkeypatch):
    monkeypatch.chdir(home)
    adapter = dict(lora_rank=2, finetune_from_ckp_file="base", optimizer="adamw")
    for options in ({}, dict(dropout=-1.0, epochs=3), adapter, dict(max_steps=3)):
        if "finetune_from_ckp_file" in options:
            assert train(home, output_dir="base", **SHORT).codes == [0]
        ours, planned, examined = recipes(home, **options)
        assert ours == planned == examined
        assert ours.schedule and ours != replace(ours, dtype=torch.bfloat16)
