"""The objectives on plain text: documents to chunks, these to sequences, and one gradient however a step is cut."""

import json

import numpy as np
import pytest

from model.commands.objective import objective_on, objectives_for, on_rows
from model.commands.summary import data_text
from model.data.file_list import DataFile
from model.data.token_store import Source, open_store
from model.display.catalogue import Texts
from model.memory.plan import MemoryPlan
from model.nn.decoder.network import DecoderModel
from model.nn.decoder.sizes import DecoderModelConfig
from model.nn.registry import family_of
from model.runtime.distributed import ALONE
from model.train.examples import Examples
from model.train.gradients import attempt_gradients
from model.train.loader import Loader
from model.train.step import StepContext
from tests.parts import examples_of, farthest, gradients_of, make_config, make_model, make_pairs, schedule_of

MOST = 40
SIZES = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
TEXTS = ["".join(pair) for pair in make_pairs(14)] + ["", " \n", "好"]
PAIRS = make_pairs(9, seed=1, longest=8)
# network, objectives of texts.jsonl, of pairs.jsonl
CASES = dict(
    text=("decoder", ["text"]), span=("t5", ["span"]), prefix=("t5", ["prefix"]),
    decoder_prefix=("decoder", ["prefix"]),
    mix=("t5", ["span", "pairs", "prefix"]), decoder_mix=("decoder", ["text", "pairs", "prefix"]),
)  # fmt: skip


def make_examples(case, tokenizer, folder):
    """(Examples, network) of a case."""
    kind, names = CASES[case]
    config = make_config(objective=names[0], max_seq_len=MOST) if len(names) == 1 else None
    config = config or make_config(mix=",".join(f"{name}:x" for name in names), max_seq_len=MOST)
    network = DecoderModel(DecoderModelConfig(**SIZES, vocab_size=tokenizer.vocab_size)).initialise(0)
    network = network if kind == "decoder" else make_model(tokenizer.vocab_size)
    texts, pairs = folder / "texts.jsonl", folder / "pairs.jsonl"
    texts.write_text("".join(json.dumps(dict(text=text)) + "\n" for text in TEXTS))
    pairs.write_text("".join(json.dumps(dict(prompt=p, response=r)) + "\n" for p, r in PAIRS))
    files = [DataFile(pairs if name == "pairs" else texts, objective=name) for name in names]
    objective = objective_on(objectives_for(config, network.config, tokenizer), files)
    readers = objective.readers if len(names) > 1 else ()
    source = Source(tuple(file.path for file in files), objective, tokenizer, MOST, readers=readers)
    store = open_store(source, folder / "tokens")
    family, objective = family_of(network.config), on_rows(objective, store.rows_of_files)
    return Examples(store, objective, family, tokenizer.pad_id, seed=3), network


@pytest.fixture(scope="module", params=CASES)
def case(request, tokenizer, tmp_path_factory):
    return request.param, *make_examples(request.param, tokenizer, tmp_path_factory.mktemp(request.param))


def test_a_row_s_sequences_have_its_lengths_whatever_is_drawn_beside_it_and_stay_within_the_bounds(case):
    _, examples, _ = case
    ids = np.random.default_rng(0).permutation(len(examples))
    for epoch in (1, 2):
        lengths, together = examples.lengths(ids, epoch), examples.sequences(ids, epoch)
        assert (lengths <= examples.bounds[ids]).all() and lengths.sum(axis=1).min() > 1
        assert (lengths.max(axis=0) <= MOST + 1).all()
        alone = [examples.sequences(ids[[place]], epoch) for place in range(len(ids))]
        order = np.argsort([list(together.ids).index(row) for row in ids])
        for side in range(lengths.shape[1]):
            parts = [alone[place].columns[side] for place in order]
            np.testing.assert_array_equal(together.columns[side], np.concatenate(parts))
        np.testing.assert_array_equal(together.lengths, lengths[order])
    assert examples.histogram.longest >= examples.bounds.sum(axis=1).max()


def test_each_epoch_draws_anew_and_an_evaluation_does_not(case):
    name, examples, _ = case
    ids = np.arange(len(examples))
    first, second, again = (examples.sequences(ids, epoch) for epoch in (1, 2, 1))
    targets = [
        (x.columns[-1].tolist(), None if x.is_target is None else x.is_target.tolist()) for x in (first, second, again)
    ]
    assert targets[0] == targets[2] and (targets[0] != targets[1] or name == "text")


def test_the_gradient_of_a_step_is_the_same_however_it_is_cut(case, tokenizer):
    _, examples, model = case
    config, num_rows = make_config(), len(examples)
    loader = Loader(ALONE, examples, schedule_of(config, 4 * num_rows, num_rows))
    work = loader.work_at(1, num_rows)
    found = []
    for tokens in (10**6, 90):
        model.zero_grad()
        attempt = attempt_gradients(
            StepContext(ALONE, model, None, loader, config), MemoryPlan(tokens, 32, False, 0), work
        )
        found.append((gradients_of(model), attempt.micro_batches))
    assert found[0][1] == 1 < found[1][1]
    assert farthest(found[0][0], found[1][0]) < 1e-5
    assert model.flat.sums[0].item() == pytest.approx(np.log(tokenizer.vocab_size), abs=1), (
        "the mean over the learnt tokens"
    )


def test_what_a_text_gives_is_counted_in_chunks_and_the_file_in_texts(case, tokenizer):
    name, examples, _ = case
    kind, names = CASES[name]
    store, said = examples.store, data_text(examples, Texts("en"))
    is_whole = [
        len(tokenizer.encode(text)) + (objective != "span") > 1
        for objective in names
        if objective != "pairs"
        for text in TEXTS
    ]
    usable = sum(flag and bool(text.strip()) for flag, text in zip(is_whole, TEXTS * 3, strict=False))
    assert sum(store.rows_of_files) == len(store) > usable + len(PAIRS) * ("pairs" in names)
    assert (store.meta["texts"], store.meta["empty"]) == (usable, len(is_whole) - usable)
    chunks = len(store) - (store.rows_of_files[1] if "pairs" in names else 0)
    assert f"{chunks:,} chunks of {usable:,} texts" in said and ("pairs" in said) == ("pairs" in names)


def test_each_token_of_a_document_but_its_first_is_predicted_once(tokenizer, tmp_path):
    examples, _ = make_examples("text", tokenizer, tmp_path)
    sequences = examples.sequences(np.arange(len(examples)), 1)
    chunks = np.split(sequences.columns[0], np.cumsum(sequences.lengths[:, 0])[:-1])
    documents = [[]]
    for chunk in chunks:
        documents[-1] += chunk[bool(documents[-1]) :].tolist()
        if chunk[-1] == tokenizer.eos_id:
            documents.append([])
    assert documents[:-1] == [[*ids, tokenizer.eos_id] for ids in tokenizer.encode_batch(TEXTS[:14] + TEXTS[16:])]
    (weights,), _ = examples.weights(np.arange(len(examples)), 1)
    assert weights == sum(map(len, documents)) - len(documents[:-1])
    assert max(map(len, chunks)) == MOST


def test_a_file_of_pairs_gives_its_texts_with_both_sides(tokenizer, tmp_path):
    (tmp_path / "pairs.jsonl").write_text(json.dumps(dict(prompt="天气好吗", response="很好")) + "\n")
    (objective,) = objectives_for(make_config(objective="text")).values()
    store = open_store(Source((tmp_path / "pairs.jsonl",), objective, tokenizer, 64), tmp_path / "tokens")
    (text,) = examples_of(store, [0])[0]
    assert tokenizer.decode(text) == "天气好吗\n很好" and text[-1] == tokenizer.eos_id


@pytest.mark.parametrize(
    "kind, options, reason",
    [
        ("t5", dict(objective="text"), "objective text: this network has an encoder"),
        ("decoder", dict(objective="span"), "objective span: this network has no encoder"),
        (
            "t5",
            dict(objective="text", prompt_prefix="译："),
            "--prompt_prefix=译：: the objective pairs or dpo",
        ),
        ("t5", dict(span_density=0.3), "--span_density=0.3: the objective span uses it"),
        ("t5", dict(objective="span", span_density=1.5), "--span_density=1.5: must be above 0 and below 1"),
        (
            "t5",
            dict(objective="span", max_seq_len=4096),
            "has 100 sentinels .* needs 227, .* --sentinels=227, or lower",
        ),
        ("t5", dict(objective="denoise"), "--objective=denoise: choose one of pairs, text, span, prefix"),
    ],
)
def test_what_an_objective_cannot_do_is_refused_with_what_to_type(kind, options, reason, tokenizer):
    sizes = DecoderModelConfig(**SIZES, vocab_size=400) if kind == "decoder" else make_model(400).config
    with pytest.raises(ValueError, match=reason):
        objectives_for(make_config(**options), sizes, tokenizer)
