"""Distillation and the losses against loops: values and gradients of autograd on the plain formulas."""

import pytest
import torch
import torch.nn.functional as F

from model.nn.guides import WINDOW, Guides, TeacherOutput, seen_ids
from model.nn.loss import linear_cross_entropy
from model.nn.loss_terms import LossTerms
from tests.nn.test_loss import LargestFloat32

TOKENS, WIDTH, VOCABULARY = 150, 16, 41
ANSWERS = 90, 59, 1  # targets of each
LOOPS = ("unlikelihood", "scalegrad", "contrastive")


def drawn(dtype=torch.float32, vocabularies=(41, 41)):
    """(hidden, weight, labels, Guides) of answers that repeat themselves, with a teacher of each vocabulary."""
    draw = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, WIDTH, generator=draw).to(dtype) for n in (TOKENS, VOCABULARY))
    labels = torch.randint(8, (TOKENS,), generator=draw)
    labels[20:24] = -1  # a part that is not learnt
    places = torch.cat([torch.arange(n) for n in ANSWERS])
    places[20:24], places[24:90] = 0, torch.arange(66)
    teachers = [TeacherOutput(*(torch.randn(n, 24, generator=draw).to(dtype) for n in (TOKENS, 64)), v)
                for v in vocabularies]  # fmt: skip
    return hidden.requires_grad_(), weight.float().requires_grad_(), labels, Guides(tuple(teachers), places)


def plainly_seen(labels, places, ngram):
    """Set of ids for each target, by the definition."""
    sets = []
    for row, place in enumerate(places.tolist()):
        answer = labels[row - place : row].tolist()
        before = tuple(answer[len(answer) - ngram + 1 :]) if ngram > 1 else ()
        known = len(answer) >= ngram - 1
        starts = range(max(ngram - 1, len(answer) - WINDOW), len(answer)) if known else ()
        sets.append({answer[i] for i in starts if tuple(answer[i - ngram + 1 : i]) == before})
    return sets


def plain_loss(hidden, weight, labels, guides, terms):
    """The sum over targets by torch's own functions."""
    logits = hidden.float() @ weight.T
    known = labels >= 0
    hard = 1 - terms.distill_weight if guides.teachers else 1.0
    nll = F.cross_entropy(logits[known], labels[known], reduction="sum", label_smoothing=terms.label_smoothing)
    loss = hard * nll + terms.z_loss * logits[known].logsumexp(1).square().sum()
    if guides.teachers:
        shared, t = min(VOCABULARY, *(teacher.vocabulary for teacher in guides.teachers)), terms.distill_temperature
        p = torch.stack([(x.hidden_ND @ x.table_WD.T)[:, :shared].float() / t for x in guides.teachers])
        p = F.pad(p.softmax(2).mean(0), (0, VOCABULARY - shared))
        log_q = (logits / t).log_softmax(1)
        loss = loss + terms.distill_weight * t * t * F.kl_div(log_q[known], p[known], reduction="sum")
    if guides.places_N is not None:
        loss = loss + sum(
            plain_penalty(row, int(label), ids, terms)
            for row, label, ids in zip(
                logits, labels, plainly_seen(labels, guides.places_N, terms.loops_ngram), strict=True
            )
            if label >= 0
        )
    return loss


def plain_penalty(logits, label, seen, terms):
    others, w = sorted(seen - {label}), terms.loops_weight
    if terms.against_loops == "unlikelihood":
        return -w * (1 - logits.softmax(0)[others]).log().sum()
    if terms.against_loops == "contrastive":
        return w * (1 + (logits[others] - logits[label]).exp().sum()).log()
    raised = logits + w * torch.tensor([float(i in seen) for i in range(VOCABULARY)])
    return raised.logsumexp(0) - raised[label] - (logits.logsumexp(0) - logits[label])


def outcome(loss, hidden, weight):
    return loss.detach(), *torch.autograd.grad(loss, (hidden, weight))


@pytest.mark.parametrize("ngram", [1, 2, 3])
def test_the_ids_seen_before_a_target_are_those_of_its_answer_within_the_window(ngram):
    _, _, labels, guides = drawn()
    ids = torch.cat([seen_ids(labels, guides.places_N, slice(i, i + 40), ngram) for i in range(0, TOKENS, 40)])
    found = [[x for x in row.tolist() if x >= 0] for row in ids]
    assert [set(row) for row in found] == plainly_seen(labels, guides.places_N, ngram)
    assert all(len(row) == len(set(row)) for row in found) and any(map(len, found))


@pytest.mark.parametrize("chunk_tokens", [7, 64, 1000])
@pytest.mark.parametrize(
    "teachers, terms",
    [
        (1, dict(distill_weight=1.0)),
        (2, dict(distill_weight=0.3, distill_temperature=2.5, label_smoothing=0.1, z_loss=1e-2)),
        *((0, dict(against_loops=kind, loops_weight=0.7)) for kind in LOOPS),
        *((2, dict(against_loops=kind, loops_ngram=2, distill_weight=0.4, z_loss=1e-2)) for kind in LOOPS),
    ],
)
def test_loss_and_gradients_are_those_of_autograd_on_the_plain_formula(teachers, terms, chunk_tokens):
    hidden, weight, labels, guides = drawn(vocabularies=(41, 30)[:teachers] or (41,))
    terms = LossTerms(**terms)
    guides = Guides(guides.teachers[:teachers], guides.places_N if terms.against_loops else None)
    loss, parts = linear_cross_entropy(hidden, weight, labels, chunk_tokens, terms, guides=guides)
    expected = outcome(plain_loss(hidden, weight, labels, guides, terms), hidden, weight)
    for mine, theirs in zip(outcome(loss, hidden, weight), expected, strict=True):
        assert (mine - theirs).norm() <= 1e-6 * theirs.norm()
    plain, _ = linear_cross_entropy(hidden, weight, labels)
    torch.testing.assert_close(parts[0], plain.detach(), rtol=1e-6, atol=0)  # what is reported stays the hard loss


def test_an_ensemble_of_one_twice_is_one():
    hidden, weight, labels, guides = drawn()
    once, twice = (
        outcome(linear_cross_entropy(hidden, weight, labels, terms=LossTerms(distill_weight=0.5), guides=each)[0],
                hidden, weight)
        for each in (Guides(guides.teachers[:1]), Guides(guides.teachers[:1] * 2))
    )  # fmt: skip
    for one, other in zip(once, twice, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_a_teacher_that_is_the_student_gives_no_loss_and_no_gradient(temperature):
    hidden, weight, labels, _ = drawn()
    teacher = TeacherOutput(hidden.detach(), F.pad(weight.detach(), (0, 0, 0, 64 - VOCABULARY)), VOCABULARY)
    terms = LossTerms(distill_weight=1.0, distill_temperature=temperature)
    loss, _ = linear_cross_entropy(hidden, weight, labels, terms=terms, guides=Guides((teacher,)))
    value, *gradients = outcome(loss, hidden, weight)
    assert abs(value) < 1e-4 and max(gradient.abs().max() for gradient in gradients) < 1e-5


@pytest.mark.parametrize("kind", LOOPS)
def test_in_bf16_loss_and_gradients_stay_near_float32(kind):
    terms = LossTerms(against_loops=kind, loops_weight=0.7, distill_weight=0.5)
    hidden, weight, labels, guides = drawn(torch.bfloat16)
    loss, _ = linear_cross_entropy(hidden, weight, labels, 64, terms, guides=guides)
    expected = outcome(plain_loss(hidden, weight, labels, guides, terms), hidden, weight)
    for mine, theirs in zip(outcome(loss, hidden, weight), expected, strict=True):
        assert (mine.float() - theirs.float()).norm() < 2e-2 * theirs.float().norm()


def test_logits_of_any_size_give_finite_numbers():
    hidden, weight, labels, guides = drawn()
    for kind in LOOPS:
        terms = LossTerms(against_loops=kind, loops_weight=1.0, distill_weight=0.5)
        loss, _ = linear_cross_entropy(hidden * 1e4, weight, labels, terms=terms, guides=guides)
        assert all(x.isfinite().all() for x in outcome(loss, hidden, weight))


def test_no_more_than_a_chunk_of_logits_of_each_network_exists_at_a_time():
    hidden, weight, labels, guides = drawn()
    many, terms = 30, LossTerms(distill_weight=0.5, against_loops="unlikelihood", loops_weight=1.0)
    teachers = [TeacherOutput(x.hidden_ND.repeat(many, 1), x.table_WD, x.vocabulary) for x in guides.teachers]
    guides = Guides(tuple(teachers), guides.places_N.repeat(many))
    with LargestFloat32() as largest:
        linear_cross_entropy(hidden.repeat(many, 1), weight, labels.repeat(many), 64, terms, guides=guides)[
            0
        ].backward()
    assert 0 < largest.numel < many * TOKENS * VOCABULARY / 2
