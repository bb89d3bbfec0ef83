"""The kernel of distillation and of the losses against loops against plain PyTorch in float32."""

import pytest
import torch

from model.nn.guided_loss import guided_cross_entropy_ as plain
from model.nn.loss_terms import LossTerms
from tests.nn.kernels.interpreted import interpreted_errors, relative_error

CASES = (
    (1, dict(distill_weight=1.0)),
    (3, dict(distill_weight=0.3, distill_temperature=2.0, label_smoothing=0.1, z_loss=1e-3)),
    (0, dict(against_loops="unlikelihood", loops_weight=0.5)),
    (0, dict(against_loops="scalegrad", loops_weight=1.5, label_smoothing=0.1)),
    (0, dict(against_loops="contrastive", loops_weight=0.5)),
    (2, dict(against_loops="unlikelihood", loops_weight=1.0, distill_weight=0.5, z_loss=1e-3)),
)


def guided_errors(device, dtype, num_teachers, terms, rows=9, vocabulary=5003, padding=61, num_ids=64):
    """Relative errors of losses and gradient; those of padding must be zero."""
    from model.nn.kernels.guided_cross_entropy import guided_cross_entropy_

    logits = (3 * torch.randn(rows, vocabulary + padding, device=device)).to(dtype)
    labels = torch.randint(vocabulary, (rows,), device=device)
    teachers, seen = None, None
    if num_teachers:
        teachers = (3 * torch.randn(num_teachers, rows, 4032, device=device)).to(dtype)[:, :, :4000]
    if terms.get("against_loops"):
        seen = torch.stack([torch.randperm(vocabulary, device=device)[:num_ids] for _ in range(rows)])
        seen[:, ::3], seen[::2, 1] = -1, labels[::2]
        logits.scatter_add_(1, seen.clamp(min=0), (4 * (seen >= 0)).to(dtype))
    labels[[0, rows // 2]] = -1
    exact, terms = logits.float().clone(), LossTerms(**terms)
    expected = plain(exact, labels, vocabulary, terms, (None if teachers is None else teachers.float(), seen))
    losses = guided_cross_entropy_(logits, labels, vocabulary, terms, (teachers, seen))
    assert not logits[:, vocabulary:].any() and not logits[labels < 0].any() and not losses[:, labels < 0].any()
    parts = [relative_error(*pair) for pair in zip(losses, expected, strict=True) if pair[1].any()]
    return [*parts, relative_error(logits, exact)]


def interpreted():
    return [error for case in CASES for error in guided_errors("cpu", torch.float32, *case)]


def test_the_interpreted_kernel_gives_the_same_as_pytorch():
    errors = interpreted_errors()["tests.nn.kernels.test_guided_cross_entropy"]
    assert len(errors) == 3 * len(CASES) + 2 and max(errors) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_the_kernel_in_bf16_is_within_one_percent_of_float32(case):
    sizes = dict(rows=300, vocabulary=29_298, padding=14)
    assert max(guided_errors("cuda", torch.bfloat16, *case, **sizes)) < 1e-2
