"""scripts/average.py: the mean of checkpoints or of model directories, and what it refuses."""

import importlib.util
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from model.data.tokenizer import copy_tokenizer
from model.formats.weights import export_model, load_weights
from model.run.checkpoint import save_checkpoint, snapshot_of
from model.run.train_state import TrainState
from model.train.optim import make_optimizer
from tests.parts import SHAPE, make_config, make_model

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "average.py"
SPEC = importlib.util.spec_from_file_location("average_script", SCRIPT)
SPEC.loader.exec_module(script := importlib.util.module_from_spec(SPEC))


def average(*models, output):
    return script.main([*map(str, models), "--output", str(output)])


def mean_of(models):
    states = [model.state_dict() for model in models]
    return {name: torch.stack([state[name] for state in states]).mean(0) for name in states[0]}


def same(directory, expected):
    found = load_weights(directory).tensors
    return found.keys() == expected.keys() and all(torch.allclose(found[n], t, atol=1e-6) for n, t in expected.items())


@pytest.fixture
def models(tokenizer):
    return [make_model(tokenizer.vocab_size, seed) for seed in (1, 2, 3)]


def test_directories_are_averaged_into_one_that_loads_and_keeps_settings_and_tokenizer(
    tmp_path, tokenizer, models, capsys
):
    for number, model in enumerate(models):
        export_model(model, tokenizer, tmp_path / str(number), dict(max_new_tokens=77))
    assert average(*(tmp_path / str(n) for n in range(3)), output=tmp_path / "mean") == 0
    assert "3" in capsys.readouterr().out and same(tmp_path / "mean", mean_of(models))
    assert "77" in (tmp_path / "mean" / "generation_config.json").read_text()
    assert (tmp_path / "mean" / "tokenizer.json").is_file()
    assert average(tmp_path / "0", tmp_path / "1", output=tmp_path / "mean") == 2


def test_checkpoints_of_a_run_are_averaged(tmp_path, tokenizer, models):
    copy_tokenizer(tokenizer.directory, tmp_path / "run" / "tokenizer")
    paths = []
    for step, model in enumerate(models, start=1):
        snapshot = snapshot_of(model, make_optimizer(model, make_config(average=0.1)))
        state = TrainState(step=step, shape=asdict(model.config))
        paths.append(save_checkpoint(tmp_path / "run", state, snapshot, keep=5))
    assert average(*paths, output=tmp_path / "mean") == 0
    assert same(tmp_path / "mean", mean_of(models))


def test_models_of_other_sizes_are_refused_with_the_name_of_a_tensor_and_so_are_one_model_and_an_adapter(
    tmp_path, tokenizer, models, capsys
):
    export_model(models[0], tokenizer, tmp_path / "a")
    other = make_model(tokenizer.vocab_size, shape=SHAPE | dict(d_ff=96))
    export_model(other, tokenizer, tmp_path / "b")
    assert average(tmp_path / "a", tmp_path / "b", output=tmp_path / "mean") == 2
    error = capsys.readouterr().err
    assert "DenseReluDense.wi.weight is (64, 32) in" in error and "(96, 32)" in error
    assert average(tmp_path / "a", output=tmp_path / "mean") == 2
    assert "takes two or more models" in capsys.readouterr().err
    (tmp_path / "c").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / "c" / name).write_text("{}")
    assert average(tmp_path / "a", tmp_path / "c", output=tmp_path / "mean") == 2
    assert "merge each into its base first" in capsys.readouterr().err and not (tmp_path / "mean").exists()
