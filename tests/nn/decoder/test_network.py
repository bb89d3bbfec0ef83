"""The network of Qwen against transformers', packed against one by one."""

from itertools import product

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from model.data.sequences import Sequences
from model.generate.engine import Engine, Limits, Request
from model.generate.sampling import Sampling
from model.nn.base import Packing
from model.nn.decoder.batch import collate
from model.nn.decoder.network import DecoderModel
from model.nn.decoder.sizes import DecoderModelConfig
from tests.parts import farthest, gradients_of
from tests.stock import as_hugging_face, guards_of

SIZES = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, vocab_size=90,
    initializer_range=0.2,
)  # fmt: skip
VARIANTS = {
    "qwen2": {},
    "qwen2 tied, grouped": dict(num_key_value_heads=2, tie_word_embeddings=True),
    "qwen3 tied, grouped": dict(model_type="qwen3", num_key_value_heads=2, head_dim=16, tie_word_embeddings=True),
    "qwen3": dict(model_type="qwen3", num_key_value_heads=1, head_dim=12, rope_theta=1e4),
    "llama 2": dict(model_type="llama", rope_theta=1e4),
    "llama 3": dict(
        model_type="llama",
        num_key_value_heads=2,
        tie_word_embeddings=True,
        max_position_embeddings=64,
        rope_scaling=dict(
            rope_type="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=8,
        ),
    ),
    "qwen3, YaRN": dict(
        model_type="qwen3",
        num_key_value_heads=2,
        rope_theta=1e4,
        max_position_embeddings=64,
        rope_scaling=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16),
    ),
}
LENGTHS = [(3, 5), (7, 2), (1, 9), (4, 40)]
IDS = type("Ids", (), dict(pad_id=0, eos_id=1))


@pytest.fixture(params=VARIANTS)
def model(request):
    torch.manual_seed(0)
    model = DecoderModel(DecoderModelConfig(**SIZES | VARIANTS[request.param])).initialise(1)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:  # biases and norms, which begin as zeros and ones
                p.add_(torch.randn(p.shape) * 0.2)
    return model


def sequences_of(lengths, seed=0):
    draw = np.random.default_rng(seed)
    columns = tuple(draw.integers(2, SIZES["vocab_size"], sum(column)) for column in zip(*lengths, strict=True))
    return Sequences(columns, np.array(lengths), ids=np.arange(len(lengths)))


def each_alone(sequences):
    """(ids of the whole sequence, number of its targets) of each."""
    ends = np.cumsum(sequences.lengths, axis=0)[:-1]
    columns = [np.split(column, ends[:, number]) for number, column in enumerate(sequences.columns)]
    return [(torch.from_numpy(np.concatenate(own)), len(own[-1])) for own in zip(*columns, strict=True)]


def gradients_after(model, sequences, checkpointed=0):
    model.zero_grad()
    model.gradient_checkpointing = checkpointed
    model(collate(sequences, Packing(0)), chunk_tokens=16).backward()
    return gradients_of(model)


def test_promise_1_logits_loss_and_every_gradient_are_those_of_transformers_one_by_one(model):
    sequences, theirs = sequences_of(LENGTHS), as_hugging_face(model, IDS)
    theirs.load_state_dict({name: x.clone() for name, x in theirs.state_dict().items()}, assign=True)
    theirs.tie_weights()
    hidden, labels = model.hidden(collate(sequences, Packing(0)))
    logits, loss = [], 0
    for ids, targets in each_alone(sequences):
        logits.append(theirs(ids[None]).logits[0, -targets - 1 : -1])
        loss = loss + F.cross_entropy(logits[-1], ids[-targets:], reduction="sum")
    logits = torch.cat(logits)
    assert logits.std() > 0.5
    assert (hidden @ model.output_weight.T - logits).abs().max() <= 1e-4
    torch.testing.assert_close(model(collate(sequences, Packing(0))), loss)
    loss.backward()
    assert farthest(gradients_after(model, sequences), gradients_of(theirs)) <= 1e-5


def test_gradients_are_the_same_bits_for_any_number_of_recomputed_blocks_and_with_inputs_in_host_memory(model):
    sequences = sequences_of(LENGTHS)
    plain = gradients_after(model, sequences)
    assert plain.keys() == model.state_dict().keys() and all(gradient.any() for gradient in plain.values())
    for number, model.offloads_inputs in product(range(1, 5), (False, True)):
        again = gradients_after(model, sequences, number)
        assert all(torch.equal(again[name], gradient) for name, gradient in plain.items()), number


def test_each_recomputed_block_keeps_fewer_activations(model):
    batch, kept = collate(sequences_of(LENGTHS), Packing(0)), []
    for model.gradient_checkpointing in range(4):
        saved = {}
        with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.setdefault(id(t), t), lambda t: t):
            model(batch)
        kept.append(sum(t.numel() for t in saved.values()))
    assert sorted(kept, reverse=True) == kept and kept[3] < kept[0] / 2


def test_tokens_that_are_no_targets_are_read_and_not_predicted(model):
    sequences = sequences_of(LENGTHS)
    wanted = np.arange(sum(targets for _, targets in LENGTHS)) % 3 > 0
    some = Sequences(sequences.columns, sequences.lengths, wanted)
    log_probs = model.token_log_probs(collate(sequences, Packing(0)))
    torch.testing.assert_close(model.token_log_probs(collate(some, Packing(0))), log_probs[torch.from_numpy(wanted)])


def test_promise_1_greedy_answers_are_those_of_transformers(model, monkeypatch):
    """Guards against repetition are shown generated ids alone, and count the same in the sizes of captured steps."""
    draw = np.random.default_rng(0)
    inputs = [draw.integers(2, SIZES["vocab_size"], draw.integers(1, 20)) for _ in range(40)]
    limits = Limits(9, 20, 12, 0, IDS.eos_id)
    kinds = [{}, {}, dict(no_repeat_ngram_size=2), dict(repetition_penalty=1.3, no_repeat_ngram_size=1)]
    guards = [kinds[place % 4] for place in range(40)]
    ours, theirs = answers_of(model, inputs, limits, guards), as_hugging_face(model, IDS)
    for ids, answer, guard in zip(inputs, ours, guards, strict=True):
        own = dict(max_new_tokens=12, do_sample=False, logits_processor=guards_of(guard, len(ids)))
        out = theirs.generate(torch.from_numpy(ids)[None], **own)[0, len(ids) :].tolist()
        assert answer == (out[: out.index(IDS.eos_id)] if IDS.eos_id in out else out)
    assert len(set(map(tuple, ours))) > 20, "answers that are all alike prove nothing"
    monkeypatch.setattr(Engine, "_size", lambda self, steps: (9, 20, 12))
    assert answers_of(model, inputs, limits, guards) == ours


def answers_of(model, inputs, limits, guards):
    engine, answers = Engine(model, limits), [None] * len(inputs)
    for ids, guard in zip(inputs, guards, strict=True):
        engine.add(Request(ids, limits.new_tokens, Sampling(**guard)))
    while not engine.idle:
        for progress in engine.step():
            answers[progress.number] = progress.ids
    return answers
