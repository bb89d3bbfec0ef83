"""An exported model in another form gives the same greedy ids."""

import re

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from model.data.chat_template import write_chat_template
from model.data.tokenizer import load_tokenizer
from model.formats.conversions import to_bf16, to_ctranslate2
from model.formats.weights import add_tokenizer, add_values, export_model
from model.nn.decoder.network import DecoderModel
from model.nn.decoder.sizes import DecoderModelConfig
from model.nn.registry import family_of
from model.serve.answering import answer_all, load_chat_model, prompt_ids
from tests.knowing import PAIRS, write_knowing_model
from tests.nn.decoder.test_network import SIZES
from tests.nn.decoder.test_network import VARIANTS as VARIANTS_OF_QWEN
from tests.nn.t5.test_huggingface import VARIANTS
from tests.parts import SHAPE, make_model
from tests.stock import as_hugging_face

ctranslate2 = pytest.importorskip("ctranslate2")


@pytest.fixture(scope="module")
def knowing(tmp_path_factory):
    directory = tmp_path_factory.mktemp("knowing")
    write_knowing_model(directory)
    write_chat_template(load_tokenizer(directory), directory)
    return directory


def greedy_ids(directory, texts, dtype=torch.float32):
    """transformers' greedy ids for each text."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForSeq2SeqLM.from_pretrained(directory, dtype=dtype).eval()
    found = []
    for text in texts:
        row = model.generate(**tokenizer(text, return_tensors="pt"), do_sample=False, max_new_tokens=24)[0]
        found.append([token for token in row[1:].tolist() if token != tokenizer.eos_token_id])
    return found


def ctranslate2_ids(directory, texts):
    """CTranslate2's greedy ids for each text, in the type that the directory holds."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = ctranslate2.Translator(str(directory), device="cpu", intra_threads=1)
    rows = [tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"]) for text in texts]
    results = model.translate_batch(rows, beam_size=1, max_decoding_length=24, min_decoding_length=0)
    return [tokenizer.convert_tokens_to_ids(result.hypotheses[0]) for result in results]


def test_bf16_weights_take_half_the_bytes_and_give_equal_greedy_ids(knowing, tmp_path):
    to_bf16(knowing, tmp_path / "bf16")
    wanted = {name: tensor.bfloat16() for name, tensor in load_file(knowing / "model.safetensors").items()}
    tensors = load_file(tmp_path / "bf16" / "model.safetensors")
    assert tensors.keys() == wanted.keys() and all(torch.equal(tensors[name], wanted[name]) for name in wanted)
    assert greedy_ids(tmp_path / "bf16", PAIRS, dtype="auto") == greedy_ids(knowing, PAIRS)
    chat = load_chat_model(tmp_path / "bf16", "cpu")
    inputs = [prompt_ids(chat, [("user", text)], 64) for text in PAIRS]
    assert answer_all(chat, inputs, chat.sampling, 40) == [*PAIRS.values()]


@pytest.mark.parametrize("quantization", ["int8", "float32"])
def test_ctranslate2_gives_equal_greedy_ids(knowing, tmp_path, quantization):
    to_ctranslate2(knowing, tmp_path / "fast", quantization)
    assert ctranslate2_ids(tmp_path / "fast", PAIRS) == greedy_ids(knowing, PAIRS)


@pytest.mark.parametrize("shape", [VARIANTS[name] for name in ("v1.1", "gelu", "mt5, tied", "umt5")])
def test_ctranslate2_computes_the_variants_as_transformers_does(tmp_path, tokenizer, shape):
    export_model(make_model(tokenizer.vocab_size, shape=SHAPE | shape), tokenizer, tmp_path / "best")
    to_ctranslate2(tmp_path / "best", tmp_path / "fast", "float32")
    texts = ["你好", "天气", "how"]
    assert ctranslate2_ids(tmp_path / "fast", texts) == greedy_ids(tmp_path / "best", texts)


@pytest.mark.parametrize("variant", ["qwen2 tied, grouped", "qwen3"])
def test_a_decoder_in_several_files_is_written_in_both_forms(tmp_path, tokenizer, variant):
    config = DecoderModelConfig(**SIZES | VARIANTS_OF_QWEN[variant] | dict(vocab_size=tokenizer.vocab_size))
    as_hugging_face(DecoderModel(config).initialise(1), tokenizer).save_pretrained(
        tmp_path / "best", max_shard_size="40KB"
    )
    add_tokenizer(family_of(config), tokenizer, tmp_path / "best")
    assert len(list((tmp_path / "best").glob("model-*.safetensors"))) > 1
    to_bf16(tmp_path / "best", tmp_path / "half")
    whole, half = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("best", "half"))
    assert half.dtype == torch.bfloat16
    halved = half.state_dict()
    assert all(torch.equal(tensor.bfloat16(), halved[name]) for name, tensor in whole.state_dict().items())
    to_ctranslate2(tmp_path / "best", tmp_path / "fast", "float32")
    ids = tokenizer.encode("你好 how")
    theirs = whole.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=12, pad_token_id=tokenizer.pad_id)
    model = ctranslate2.Generator(str(tmp_path / "fast"), device="cpu", intra_threads=1)
    tokens = [tokenizer.backend.id_to_token(token) for token in ids]
    (result,) = model.generate_batch([tokens], max_length=12, sampling_topk=1, include_prompt_in_result=False)
    answer = [token for token in theirs[0, len(ids) :].tolist() if token != tokenizer.eos_id]
    assert result.sequences_ids[0][: len(answer)] == answer


def test_a_directory_without_a_model_is_refused(tmp_path):
    for write in (to_bf16, to_ctranslate2):
        with pytest.raises(ValueError, match="no model in"):
            write(tmp_path, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_what_ctranslate2_does_not_convert_is_refused_with_the_other_way(knowing, tmp_path, monkeypatch):
    monkeypatch.setattr("ctranslate2.converters.transformers._MODEL_LOADERS", {})
    with pytest.raises(ValueError, match="cannot convert this model .* --to bf16"):
        to_ctranslate2(knowing, tmp_path / "fast")
    assert not (tmp_path / "fast").exists()


def test_the_snippet_of_the_card_answers(knowing, tmp_path, monkeypatch, capsys):
    add_values(knowing / "generation_config.json", dict(no_repeat_ngram_size=7))
    to_ctranslate2(knowing, tmp_path / "fast")
    monkeypatch.chdir(tmp_path / "fast")
    card = (tmp_path / "fast" / "README.md").read_text(encoding="utf-8")
    assert "no_repeat_ngram_size=7" in card
    exec(re.search(r"```python\n(.*?)```", card, re.DOTALL).group(1), {})
    assert capsys.readouterr().out.strip() == PAIRS["你好"]
