import json

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from model.data.token_store import open_store
from model.data.tokenizer import copy_tokenizer, load_tokenizer
from model.generate.answers import answer
from model.nn.t5.batch import collate
from model.nn.t5.huggingface import as_hugging_face
from model.nn.weights_io import export_model
from model.train.evaluate import answer_pairs
from model.train.optim import make_optimizer
from tests.parts import ALONE, PLAN, make_config, make_model, write_parquet


def padding_with_eos(tokenizer, directory):
    """A copy of `tokenizer` in `directory` whose pad token is its EOS, as many have it."""
    copy_tokenizer(tokenizer.directory, directory)
    settings = directory / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | dict(pad_token="[EOS]")))
    return load_tokenizer(directory)


@pytest.mark.parametrize("pad", ["[PAD]", "[EOS]"])
def test_generation_of_an_over_fitted_pair_stops_at_eos(tmp_path, tokenizer, pad):
    tokenizer = padding_with_eos(tokenizer, tmp_path / "given") if pad == "[EOS]" else tokenizer
    prompt, response = "今天天气怎么样", "今天天气真好"
    store = open_store(
        write_parquet(tmp_path / "one.parquet", [(prompt, response)]), tokenizer, 64, tmp_path / "tokens"
    )
    model = over_fit(make_model(tokenizer.vocab_size), store, tokenizer)
    export_model(model, tokenizer, tmp_path / "best")
    stock, stock_tokenizer = (
        kind.from_pretrained(tmp_path / "best") for kind in (AutoModelForSeq2SeqLM, AutoTokenizer)
    )
    out = stock.generate(**stock_tokenizer(prompt, return_tensors="pt"), max_new_tokens=60, do_sample=False)[0].tolist()
    assert out == [tokenizer.pad_id, *tokenizer.encode(response), tokenizer.eos_id]
    assert stock_tokenizer.decode(out, skip_special_tokens=True) == response
    (answer,) = answer_pairs(ALONE, as_hugging_face(model, tokenizer), store, tokenizer, PLAN, 1, 60, torch.float32)
    assert (answer.prompt, answer.answer, answer.reference) == (prompt, response, response)


def test_prompts_answered_together_keep_their_eos_if_it_is_the_pad_token(tmp_path, model, store, tokenizer):
    tokenizer = padding_with_eos(tokenizer, tmp_path)
    assert tokenizer.pad_id == tokenizer.eos_id
    stock, masks = as_hugging_face(model, tokenizer), []
    generate, ids = stock.generate, list(range(8))
    stock.generate = lambda *args, **values: (masks.append(values["attention_mask"]), generate(*args, **values))[1]
    together = answer(stock, store, tokenizer, ids, 8)
    assert masks[0].sum(1).tolist() == store.lengths[ids, 0].tolist()
    assert together == [answer(stock, store, tokenizer, [i], 8)[0] for i in ids]


def over_fit(model, store, tokenizer):
    optimizer = make_optimizer(model, make_config(learn_rate=0.02))
    micro_batch = collate(store, [0], tokenizer.pad_id, "cpu")
    for _ in range(100):
        loss = model(micro_batch) / len(micro_batch.labels)
        model.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.05
    return model
