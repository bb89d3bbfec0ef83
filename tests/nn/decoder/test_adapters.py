"""Adapters on Qwen against PEFT, and merged into a base in bf16."""

import json

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file

from model.formats import adapters
from model.formats.adapters import export_adapter, export_merged, load_merged
from model.formats.weights import export_model
from model.nn.decoder.family import LAYERS
from model.nn.decoder.network import DecoderModel
from model.nn.decoder.sizes import DecoderModelConfig
from model.nn.lora import merged
from model.serve.answering import _frozen
from tests.nn.decoder.test_network import IDS, LENGTHS, SIZES, VARIANTS, each_alone, gradients_after, sequences_of
from tests.nn.test_lora import adapted, with_peft
from tests.parts import farthest
from tests.stock import as_hugging_face


def make_model(variant):
    return DecoderModel(DecoderModelConfig(**SIZES | VARIANTS[variant])).initialise(1)


@pytest.mark.parametrize("targets", [LAYERS, ("q_proj", "v_proj"), ("gate_proj", "o_proj")])
@pytest.mark.parametrize("variant", VARIANTS)
def test_promise_2_gradients_of_adapters_are_those_of_peft_one_by_one(variant, targets):
    model, sequences = adapted(make_model(variant), targets, use_rslora=targets == LAYERS), sequences_of(LENGTHS)
    theirs = with_peft(as_hugging_face(make_model(variant), IDS), model)
    for ids, count in each_alone(sequences):
        F.cross_entropy(theirs(ids[None]).logits[0, -count - 1 : -1], ids[-count:], reduction="sum").backward()
    expected = {
        name.removeprefix("base_model.model.").replace(".default", ""): p.grad
        for name, p in theirs.named_parameters() if p.grad is not None
    }  # fmt: skip
    assert expected.keys() == model.saved_tensors().keys() and all(x.any() for x in expected.values())
    for recomputed in (0, 2):
        assert farthest(gradients_after(model, sequences, recomputed), expected) <= 1e-5


@pytest.fixture
def base(tmp_path, tokenizer):
    """A directory of a Qwen in bf16."""
    model = DecoderModel(DecoderModelConfig(**SIZES | dict(vocab_size=tokenizer.vocab_size))).initialise(1)
    export_model(model, tokenizer, tmp_path / "base")
    file = tmp_path / "base" / "model.safetensors"
    save_file({name: x.bfloat16() for name, x in load_file(file).items()}, file, dict(format="pt"))
    return tmp_path / "base"


def test_an_adapter_is_merged_in_float32_and_written_in_the_precision_of_its_base(base, tokenizer, monkeypatch):
    model, folder = adapted(make_model("qwen2"), LAYERS, base=str(base)), base.parent
    export_adapter(model, tokenizer, folder / "adapter")
    weights, factors = load_merged(folder / "adapter"), model.saved_tensors()
    assert all(torch.equal(x, load_file(base / "model.safetensors")[name]) for name, x in weights.tensors.items())
    monkeypatch.setattr(adapters, "SHARD_BYTES", 15_000)
    export_merged(weights, tokenizer, folder / "merged", dict(max_new_tokens=7))
    files = sorted(path.name for path in (folder / "merged").glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    written = {name: x for file in files for name, x in load_file(folder / "merged" / file).items()}
    for name, x in weights.tensors.items():
        assert torch.equal(written[name], merged(name, x, factors, model.lora).bfloat16()), name
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder / "merged")
    assert theirs.dtype == torch.bfloat16 and theirs.generation_config.max_new_tokens == 7
    in_memory = _frozen(weights, base, torch.device("cpu"), torch.float32).state_dict()
    on_disk = _frozen(load_merged(folder / "merged"), base, torch.device("cpu"), torch.float32).state_dict()
    name = "model.layers.1.mlp.down_proj.weight"
    assert torch.equal(in_memory[name], merged(name, weights.tensors[name], factors, model.lora))
    assert torch.equal(on_disk[name], in_memory[name].bfloat16().float())
    assert json.loads((folder / "merged" / "config.json").read_text())["dtype"] == "bfloat16"


def test_an_adapter_that_does_not_fit_its_base_is_refused(base, tokenizer):
    export_adapter(
        adapted(make_model("qwen2 tied, grouped"), LAYERS, base=str(base)), tokenizer, base.parent / "adapter"
    )
    with pytest.raises(ValueError, match="does not fit .*k_proj.weight, and the adapter needs"):
        load_merged(base.parent / "adapter")
