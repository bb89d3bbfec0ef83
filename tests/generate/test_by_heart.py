"""An answer that a network knows by heart comes whole, whatever it repeats: from us, and by transformers' generate."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedTokenizerFast

from model.commands.option_values import load_config
from model.data.conversation import Turn
from model.data.sequences import Sequences
from model.data.turn_template import turn_template, with_turn_end
from model.formats.weights import export_model
from model.generate.sampling import Sampling, generation_config
from model.nn.base import Packing
from model.nn.decoder.network import DecoderModel
from model.nn.decoder.sizes import DecoderModelConfig
from model.nn.registry import family_of
from model.serve.answering import answer_all, load_chat_model, prompt_ids
from model.train.optim import make_optimizer
from tests.parts import make_config, make_model

QUESTION = "国人民大地方今天真好我想和你"
ANSWER = QUESTION + "好" * 12  # the question again, then a run of one token
DECODER = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, initializer_range=0.1)
CONFIG = load_config("pretrain", {})


def learnt(model, tokenizer):
    """`model` after it has learnt ANSWER by heart."""
    family = family_of(model.config)
    prompt = [*tokenizer.encode(QUESTION), tokenizer.eos_id]
    if family.reads_dialogues:
        prompt = turn_template(tokenizer).encode_question([Turn("user", QUESTION)], 200)
    columns = np.array(prompt), np.array([*tokenizer.encode(ANSWER), tokenizer.eos_id])
    lengths = np.array([[len(column) for column in columns]])
    batch = family.collate(Sequences(columns, lengths, ids=np.arange(1)), Packing(tokenizer.pad_id))
    optimizer = make_optimizer(model, make_config(optimizer="muon", learn_rate=0.02))
    for _ in range(250):
        model.zero_grad()
        loss = model(batch) / lengths[:, 1].sum()
        if loss < 0.01:
            break
        loss.backward()
        optimizer.update(0.02, torch.tensor(1.0))
    assert loss < 0.02
    return model


@pytest.mark.parametrize("family", ["t5", "qwen"])
def test_an_answer_known_by_heart_repeats_itself_and_quotes_its_question_in_full(tmp_path, tokenizer, family):
    if family == "qwen":
        tokenizer = with_turn_end(tokenizer)
        model = DecoderModel(DecoderModelConfig(**DECODER, vocab_size=tokenizer.vocab_size)).initialise(1)
    else:
        model = make_model(tokenizer.vocab_size)
    generation = generation_config(Sampling(no_repeat_ngram_size=CONFIG.no_repeat_ngram_size), CONFIG.max_new_tokens)
    export_model(learnt(model, tokenizer), tokenizer, tmp_path / "best", generation)
    chat = load_chat_model(tmp_path / "best", "cpu")
    ids = prompt_ids(chat, [("user", QUESTION)], 200)
    assert answer_all(chat, [ids], chat.sampling, chat.max_new_tokens) == [ANSWER]
    kind = AutoModelForCausalLM if family == "qwen" else AutoModelForSeq2SeqLM
    stock = kind.from_pretrained(tmp_path / "best")
    out = stock.generate(torch.tensor([ids]))[0, len(ids) if family == "qwen" else 0 :]
    assert PreTrainedTokenizerFast.from_pretrained(tmp_path / "best").decode(out, skip_special_tokens=True) == ANSWER
