"""What a run is set up from: fine-tuning weights, tokenizer and model configuration through real runs, and the plan."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from config import MODELS
from model.commands.no_model import check_source
from model.commands.option_values import load_config
from model.commands.recipe import plan_options
from model.data.length_histogram import histogram
from model.data.tokenizer_training import train_tokenizer
from model.memory.oom_policy import PlanRecovery
from model.memory.plan import NothingFits, choose_plan
from model.nn.t5.sizes import T5ModelConfig
from model.run.checkpoint import TrainState
from model.run.train_state import kept_recovery
from tests.english import english_of
from tests.parts import PLAN, make_estimate
from tests.ranks import ROOT
from tests.tiny import OPTIONS, SHAPE, SHORT, command, journal, refused, train

RECORDED = replace(PLAN, graphs=True)


@pytest.fixture(scope="module")
def done_run(home):
    """A finished run's directory, relative to home."""
    done = train(home, output_dir="done", **SHORT)
    assert done.codes == [0], done.text
    return "done"


def first_loss(home, name):
    return journal(home / name, "train")[0]["loss"]


@pytest.mark.parametrize("source", ("done/best", "done", "weights.bin"))
def test_fine_tuning_starts_from_the_given_weights(home, done_run, source):
    torch.save(load_file(home / done_run / "best" / "model.safetensors"), home / "weights.bin")
    name = "tuned_" + Path(source).name
    options = dict(output_dir=name, finetune_from_ckp_file=source, use_fast_config=True)
    done = train(home, env=dict(CHAT_LANG="zh"), **options, **SHORT)
    assert done.codes == [0], done.text
    assert json.loads((home / name / "config.json").read_text())["preset"] == "sft_fast"
    assert first_loss(home, name) < first_loss(home, done_run) - 0.1
    assert f"从 {source} 的权重开始" in done.text and "训练：轮:" in done.text and not english_of(done.text)


def test_fine_tuning_with_another_tokenizer_is_refused(home, done_run):
    train_tokenizer(["这是另外一个词表" * 40, "完全不同的文字" * 40], 407, home / "other_tokenizer")
    done = train(home, output_dir="other", finetune_from_ckp_file=done_run, tokenizer_dir="other_tokenizer")
    assert refused(done, "leave --tokenizer_dir out")


def test_weights_without_a_tokenizer_beside_them_need_tokenizer_dir(home, done_run):
    shutil.copytree(home / done_run / "best", home / "bare", ignore=lambda *_: ["tokenizer.json"])
    options = dict(output_dir="named", finetune_from_ckp_file="bare", **SHORT)
    assert refused(train(home, **options), "bare has no tokenizer.json", "--tokenizer_dir")
    done = train(home, tokenizer_dir="model_save/tokenizer", **options)
    assert done.codes == [0], done.text


def test_a_resumed_fine_tuning_keeps_the_model_configuration_of_its_weights(home, done_run):
    options = dict(output_dir="shaped", finetune_from_ckp_file=done_run, model=None, **SHORT)
    done = train(home, 1, "forward:0:2:int", **options)
    assert done.codes == [0], done.text
    stopped, test = home / "shaped", ["test", "--output_dir=shaped"]
    with pytest.raises(ValueError, match=f"last/ and no best/ yet: type --finetune_from_ckp_file={stopped}/last"):
        check_source(stopped / "best")
    words = ["--validation_file=", "--test_file=valid.jsonl"]
    assert refused(command(home, *test), f"to test last/ type {' '.join(words)}, or go on")
    assert "test shaped/last: loss" in command(home, *test, *words).text
    shutil.rmtree(stopped / "last")
    assert refused(command(home, *test), "before its first evaluation, which writes best/: go on with it")
    for place in ("best", "."):
        with pytest.raises(
            ValueError, match="before its first evaluation, .*: go on with it: .*shaped --is_keep_training=True"
        ):
            check_source(stopped / place)
    done = train(home, 1, is_keep_training=True, **options)
    assert done.codes == [0], done.text


def test_fine_tuning_with_another_model_than_the_weights_have_is_refused(home, done_run):
    (home / "wide.json").write_text(json.dumps(SHAPE | dict(d_model=24)))
    done = train(home, output_dir="wide", finetune_from_ckp_file=done_run, model="wide.json")
    assert refused(
        done,
        f"--model=wide.json: leave it out, the weights in {done_run} set the sizes: d_model 24, the weights have 16\n",
    )


def test_a_bin_file_that_does_not_fit_the_model_is_refused_before_tokenising(home, done_run):
    torch.save(load_file(home / done_run / "last" / "model.safetensors"), home / "old.bin")
    options = dict(output_dir="wrong_size", finetune_from_ckp_file="old.bin", model="small", train_file="nothing.jsonl")
    assert refused(train(home, **options), "old.bin does not fit this model", "give it with --model")


def test_weights_that_would_execute_code_are_refused(home):
    torch.save(dict(model=shutil.rmtree), home / "code.bin")
    assert refused(train(home, output_dir="code", finetune_from_ckp_file="code.bin"), "code.bin")


def test_config_json_holds_the_options_that_were_typed(home, done_run):
    stored = json.loads((home / done_run / "config.json").read_text())
    assert {name: stored["given"][name] for name in OPTIONS} == {
        name: str(value) for name, value in (OPTIONS | SHORT).items()
    }


def test_a_plan_without_cuda_graphs_recovers_them_only_if_the_resumed_run_may_record():
    growth = asdict(PlanRecovery(RECORDED, calm_steps=3))
    state = TrainState(plan=asdict(PLAN), growth=growth)
    assert kept_recovery(state, PLAN, may_capture=True) == growth
    assert kept_recovery(state, PLAN, may_capture=False) == asdict(PlanRecovery(PLAN, calm_steps=3))
    assert kept_recovery(state, RECORDED, may_capture=True) is None


def test_a_model_that_cannot_fit_is_refused_with_its_bytes_before_anything_is_allocated(store):
    shape = T5ModelConfig(**MODELS["chatlm"], vocab_size=40_960)
    config = load_config("pretrain", dict(optimizer="adamw_rms"))
    lengths = histogram(store.lengths)
    estimate = make_estimate(config, shape, torch.float32, lengths, 16)
    assert choose_plan(plan_options(config), estimate, 8 * 2**30)
    with pytest.raises(NothingFits, match="weights 0.73, bf16_weights 0.00, gradients 0.73, optimizer 1.47"):
        choose_plan(plan_options(config), estimate, 3 * 2**30)


def test_a_start_does_not_import_the_compiler_of_torch_which_takes_seconds(home):
    code = (
        "import sys; from model.commands.option_values import load_config; "
        "from model.commands.setup import prepare_run; "
        "from model.runtime.distributed import ALONE; "
        f"prepare_run(ALONE, load_config('pretrain', {OPTIONS | dict(output_dir='plain')}), (), False); "
        "sys.exit('torch._inductor' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=home, env=os.environ | dict(PYTHONPATH=str(ROOT)))
    assert done.returncode == 0
