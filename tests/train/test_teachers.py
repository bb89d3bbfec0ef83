"""Runs that learn from teachers or against loops: gradients, ranks, resumes, memory that runs out, refusals."""

import functools
import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from model.commands.machine import Machine
from model.commands.teachers import TeacherStart
from model.commands.teachers import taught as taught_spec
from model.data.sequences import Sequences, with_places
from model.data.tokenizer import load_tokenizer
from model.data.tokenizer_training import train_tokenizer
from model.formats.weights import export_model
from model.memory.estimate import Estimate, fixed_bytes
from model.memory.plan import MemoryPlan
from model.nn.base import Packing
from model.nn.decoder.batch import collate
from model.nn.decoder.network import DecoderModel
from model.nn.decoder.sizes import DecoderModelConfig
from model.nn.loss_terms import LossTerms
from model.train.evaluate import evaluate_loss
from model.train.gradients import attempt_gradients
from model.train.objectives.pairs import Pairs
from tests.nn.test_loss import LargestFloat32
from tests.parts import (
    context_of,
    evaluation_of,
    examples_in,
    farthest,
    gradients_of,
    make_config,
    make_model,
    make_pairs,
    make_spec,
)
from tests.tiny import SHORT, journal, refused, train, weights_hash

TERMS = dict(teacher="x", distill_weight=0.4, distill_temperature=2.0, against_loops="unlikelihood")
LARGER = dict(d_model=48, d_ff=96, num_heads=3, d_kv=16, num_layers=1, num_decoder_layers=2)


def taught_model(vocab_size, dtype=torch.float32, **options):
    """A student with two teachers, one of another size."""
    model = make_model(vocab_size, compute_dtype=dtype, **options)
    shapes = ({}, dict(shape=LARGER))
    model.teachers = tuple(
        make_model(vocab_size, seed=7, compute_dtype=dtype, **shape).requires_grad_(False).eval() for shape in shapes
    )
    for teacher in model.teachers:
        teacher.make_flat()
    return model


def gradients(store, model, config, plan, ids=None):
    context = context_of(model, None, store, config, total_pairs=len(store), global_batch=len(store))
    examples = replace(context.loader.examples, places=config.against_loops != "none")
    context = replace(context, loader=replace(context.loader, examples=examples))
    work = context.loader.work_at(0, 0)
    attempt = attempt_gradients(context, plan, work if ids is None else replace(work, ids=ids))
    return gradients_of(model), attempt.micro_batches, model.flat.sums.clone()


def test_the_gradient_of_a_taught_step_is_one_packed_split_or_on_several_ranks(store, tokenizer):
    config, model = make_config(**TERMS), taught_model(tokenizer.vocab_size)
    whole, one, sums = gradients(store, model, config, MemoryPlan(10**6, 10**6, 0, 0))
    split, many, _ = gradients(store, model, config, MemoryPlan(200, 32, 2, 0))
    assert one == 1 and many > 5 and farthest(split, whole) < 1e-5
    shares = [gradients(store, model, config, MemoryPlan(300, 64, 0, 0), np.arange(rank, len(store), 2))[0]
              for rank in (0, 1)]  # fmt: skip
    assert farthest({name: shares[0][name] + shares[1][name] for name in whole}, whole) < 1e-5
    plain, _, plain_sums = gradients(
        store, make_model(tokenizer.vocab_size), make_config(), MemoryPlan(10**6, 64, 0, 0)
    )
    assert farthest(plain, whole) > 0.1
    torch.testing.assert_close(sums[0], plain_sums[0], rtol=1e-5, atol=0)  # the journal's loss is the hard one


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_promise_5_a_taught_step_holds_no_fp32_tensor_of_batch_by_length_by_vocabulary(store, tokenizer, dtype):
    model, config = taught_model(tokenizer.vocab_size, dtype), make_config(**TERMS)
    targets = int(store.lengths[:, 1].sum())
    with LargestFloat32() as largest:
        _, micro_batches, _ = gradients(store, model, config, MemoryPlan(10**6, 64, 0, 0))
    assert micro_batches == 1 and 0 < largest.numel < targets * tokenizer.vocab_size / 3


def test_an_evaluation_is_of_the_hard_loss_and_runs_no_teacher(store, tokenizer):
    model, plain = taught_model(tokenizer.vocab_size), evaluation_of(make_model(tokenizer.vocab_size), store, tokenizer)
    model.teachers = (None,)
    objective = Pairs(LossTerms(distill_weight=0.5, against_loops="unlikelihood", loops_weight=1.0))
    examples = examples_in(store, tokenizer.pad_id, objective)
    taught = replace(evaluation_of(model, store, tokenizer), examples=examples)
    plan = MemoryPlan(400, 64, 0, 0)
    assert evaluate_loss(taught, plan)["loss"] == evaluate_loss(plain, plan)["loss"]


def test_the_plan_counts_the_teachers_weights_their_forward_and_a_chunk_of_their_logits(store, tokenizer):
    config, model = make_config(), make_model(tokenizer.vocab_size)
    spec = make_spec(config, model.config, torch.bfloat16)
    large = make_spec(config, replace(model.config, d_model=2048, d_ff=8192), torch.bfloat16)
    taught = replace(spec, teachers=(large, large))
    assert fixed_bytes(taught)["teachers"] == 2 * 2 * large.parameters and "teachers" not in fixed_bytes(spec)
    lengths = examples_in(store).histogram
    with_teachers, without = (Estimate(each, lengths, 64).step_parts(4000, 512, 0) for each in (taught, spec))
    logits = 2 * min(512, 4000) * tokenizer.vocab_size * 2
    assert with_teachers["loss"] > without["loss"] + logits and with_teachers["teachers"] > 0
    assert with_teachers["decoder"] == without["decoder"]


def a_stream(lengths, is_target=None):
    """Sequences of two columns with these lengths; a source may be empty."""
    lengths = np.array(lengths)
    ids = [np.random.default_rng(column).integers(3, 9, total) for column, total in enumerate(lengths.sum(axis=0))]
    return Sequences(tuple(ids), lengths, is_target)


def test_places_count_the_targets_directly_before_each_in_its_answer():
    is_target = np.array([1, 1, 1, 0, 0, 1, 1, 1, 1, 1], bool)
    places = with_places(a_stream([(2, 7), (0, 3)], is_target)).token_values["places"]
    assert places.tolist() == [0, 1, 2, 0, 0, 0, 1, 0, 0, 1]  # nothing predicts the first token without a source


@pytest.mark.parametrize("kind", ["unlikelihood", "scalegrad", "contrastive"])
def test_a_decoders_gradient_against_loops_is_one_packed_and_one_by_one(kind):
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, vocab_size=60)
    model, terms = (
        DecoderModel(DecoderModelConfig(**sizes)).initialise(1),
        LossTerms(against_loops=kind, loops_weight=1.0, distill_weight=0.5),
    )
    model.teachers = (DecoderModel(DecoderModelConfig(**sizes | dict(num_hidden_layers=1))).initialise(2).eval(),)
    lengths, found = [(5, 30), (1, 20), (0, 9)], []
    is_target = np.arange(59) % 17 > 2
    stream = a_stream(lengths, is_target)
    columns = [
        np.split(column, ends[:-1]) for column, ends in zip(stream.columns, np.cumsum(lengths, 0).T, strict=True)
    ]
    learnt = np.split(is_target, np.cumsum([target for _, target in lengths])[:-1])
    alone = [
        Sequences(own, np.array([length]), part)
        for *own, length, part in zip(*columns, lengths, learnt, strict=True)
    ]  # fmt: skip
    for parts in ([stream], alone):
        model.zero_grad()
        for part in parts:
            model.cross_entropy(collate(with_places(part), Packing(0)), 16, terms)[0].backward()
        found.append(gradients_of(model))
    assert farthest(*found) < 1e-5


def test_a_teacher_whose_heads_the_attention_kernels_do_not_support_is_refused_where_they_run():
    config = make_model(60).config
    spec = make_spec(make_config(), config, torch.bfloat16)
    teacher = TeacherStart("other", replace(config, d_kv=20), "", None)
    assert spec.kernels
    with pytest.raises(ValueError, match="do not support the heads of --teacher=other.*--mixed_precision=no"):
        taught_spec(spec, (teacher,), Machine(device_type="cuda"), torch.bfloat16)
    assert taught_spec(spec, (replace(teacher, model_config=config),), Machine(device_type="cuda"), torch.bfloat16)


TAUGHT = dict(teacher="teacher,larger", distill_weight=0.5, distill_temperature=1.5, against_loops="unlikelihood")


@pytest.fixture(scope="module")
def taught(home):
    """Function of the number of ranks that gives the directory of a run with two teachers, without faults."""
    (home / "larger.json").write_text(json.dumps(LARGER))
    for options in (dict(output_dir="teacher", seed=5), dict(output_dir="larger", model="larger.json")):
        done = train(home, **options, **SHORT)
        assert done.codes == [0], done.text

    @functools.cache
    def run(world):
        done = train(home, world, output_dir=f"taught{world}", dropout=0.1, **TAUGHT)
        assert done.codes == [0] * world and "teachers: teacher,larger; 50% of the loss" in done.text, done.text
        return home / f"taught{world}"

    return run


@pytest.mark.parametrize("world", (1, 2))
def test_a_taught_run_killed_and_short_of_memory_ends_with_the_bits_of_one_that_was_not(home, taught, world):
    for fault in (f"forward:{world - 1}:5:kill", "backward:last:7:oom,evaluate:0:6:oom", ""):
        train(home, world, fault, output_dir=f"killed{world}", is_keep_training="auto", dropout=0.1, **TAUGHT)
    assert weights_hash(home / f"killed{world}") == weights_hash(taught(world))
    assert journal(home / f"killed{world}", "oom") or world == 1


def test_a_taught_run_on_two_ranks_has_the_loss_of_one_and_is_another_than_untaught(home, taught):
    one, two = ([line["loss"] for line in journal(taught(world), "train")] for world in (1, 2))
    assert one == pytest.approx(two, rel=1e-3)
    assert train(home, output_dir="plain", dropout=0.1).codes == [0]
    assert journal(home / "plain", "train")[0]["loss"] == pytest.approx(one[0], rel=1e-6)  # both report the hard loss
    assert weights_hash(home / "plain") != weights_hash(taught(1))


def test_a_run_goes_on_with_teachers_that_have_moved_and_refuses_others(home, taught):
    shutil.copytree(taught(1), home / "moved")
    shutil.copytree(home / "teacher" / "best", home / "elsewhere")
    going_on = dict(output_dir="moved", is_keep_training=True, epochs=3)
    assert refused(train(home, teacher="larger", **going_on), "taught by", "resume with the same")
    done = train(home, teacher="elsewhere,larger", **going_on)
    assert done.codes == [0], done.text
    done = train(home, command="test", output_dir="moved")
    assert done.codes == [0] and "nats_per_char" in done.text, done.text


def test_a_teacher_that_cannot_teach_is_refused_with_the_reason(home, taught):
    run = taught(1)
    train_tokenizer([text for pair in make_pairs(300, seed=9) for text in pair], 507, home / "others")
    shutil.copytree(run / "best", home / "foreign")
    for path in (home / "others").iterdir():
        shutil.copy(path, home / "foreign" / path.name)
    shutil.copytree(run / "best", home / "decoder")
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2)
    tokenizer = load_tokenizer(run / "best")
    model = DecoderModel(DecoderModelConfig(**sizes, vocab_size=tokenizer.vocab_size)).initialise(1)
    export_model(model, tokenizer, home / "decoder")
    for name, reason in dict(
        absent="no model there", foreign="trained with the same tokenizer", decoder="take a teacher of the same family"
    ).items():
        assert refused(train(home, output_dir="none", teacher=f"teacher,{name}"), f"--teacher={name}", reason)
    assert refused(train(home, output_dir="none", distill_weight=0.7), "only teacher uses it")
    assert refused(train(home, output_dir="none", loops_ngram=2), "only against_loops uses it")


def test_an_adapter_learns_from_a_teacher(home, taught):
    options = dict(finetune_from_ckp_file="teacher", lora_rank=4, teacher=str(taught(1)))
    done = train(home, 1, "forward:0:3:oom", output_dir="adapter", **options)
    assert done.codes == [0], done.text
    done = train(home, output_dir="of_adapter", teacher="adapter", **SHORT)
    assert done.codes == [0], done.text
