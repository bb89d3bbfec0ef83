"""The kernels' dropout against PyTorch's: on a CPU in Triton's interpreter, on a GPU as it is."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.nn.kernels.interpreted import interpreted_errors, relative_error

IDS = [5, 2**31 + 1, 2**33 + 7]
NAMES = "dropout", "grad", "sum", "relu", "relu grad", "stream", "normed", "grad x", "grad added", "grad weight"


def outcomes(device, dtype, lengths, width, kernels, probability=0.1, site=9):
    """What each of NAMES is, by the kernels or by PyTorch. Both are called here, so that neither may be the other."""
    from model.nn.dropout import Masks, is_kept, step_key, token_keys

    generator = torch.Generator().manual_seed(width)
    x, added, grad = torch.randn(3, sum(lengths), width, generator=generator).to(device, dtype)
    weight = (torch.rand(width, generator=generator) + 0.5).to(device)
    keys = torch.from_numpy(token_keys(IDS[: len(lengths)], lengths, 1)).to(device)
    masks = Masks(probability, torch.tensor(step_key(3, 8), dtype=torch.int32, device=device), keys, site)
    leaves = [t.clone().requires_grad_() for t in (x, added, weight)]
    if kernels:
        from model.nn.kernels.dropout import drop, relu_drop_, relu_drop_backward
        from model.nn.kernels.norm import add_norm

        values = [drop(x, None, masks), drop(grad, None, masks), drop(added, x, masks)]
        relu = x.clone()
        relu_drop_(relu, masks)
        values += [relu, relu_drop_backward(grad, relu, masks.scale)]
        stream, normed = add_norm(*leaves, 1e-6, masks)
    else:
        factor = is_kept(masks, width) * masks.scale
        values = [x * factor, grad * factor, x + (added.float() * factor).to(dtype)]
        values += [F.relu(x) * factor, torch.where(x > 0, grad * factor, 0)]
        stream = leaves[0] + (leaves[1] * factor).to(dtype)
        normed = F.rms_norm(stream.float(), (width,), leaves[2], 1e-6).to(dtype)
    torch.autograd.backward([stream, normed], [grad.to(stream.dtype), x.to(normed.dtype)])
    values += [stream.detach(), normed.detach(), *(leaf.grad for leaf in leaves)]
    return [value.to(dtype) if value.shape == x.shape else value for value in values]


def differences(device, dtype, *case):
    """(numbers that are dropped by only one of the two, largest relative error of NAMES)."""
    ours, reference = (outcomes(device, dtype, *case, kernels=kernels) for kernels in (True, False))
    dropped = sum(int(((a == 0) != (b == 0)).sum()) for a, b in zip(ours[:5], reference[:5], strict=True))
    dropped += int(((ours[8] == 0) != (reference[8] == 0)).sum())
    assert len(ours) == len(reference) == len(NAMES)
    return [dropped, max(relative_error(*pair) for pair in zip(ours, reference, strict=True))]


def network_error(gradient_checkpointing):
    """Largest relative distance of the gradients of a T5 whose norms and dropout run in the kernels from PyTorch's.

    For a process of its own: it replaces functions.
    """
    from model.nn import dropout, layers
    from model.nn.attention import make_layout
    from model.nn.t5.batch import MicroBatch
    from tests.parts import farthest, gradients_of, make_model

    lengths = [np.array([3, 9, 4]), np.array([5, 2, 11])]
    ids = [torch.randint(500, (side.sum(),)) for side in (lengths[0], lengths[1], lengths[1])]
    layouts = [make_layout(lengths[queries], lengths[keys]) for queries, keys in ((0, 0), (1, 1), (1, 0))]
    keys = [torch.from_numpy(dropout.token_keys(IDS, of_side, side)) for side, of_side in enumerate(lengths)]
    model, gradients = make_model(500, dropout=0.2), []
    model.gradient_checkpointing = gradient_checkpointing
    model.key_dropout(3, 2**40)
    for kernels in (True, False):
        layers.runs_kernels = dropout.runs_kernels = lambda _, kernels=kernels: kernels
        model.zero_grad()
        model(MicroBatch(*ids, *layouts, {}, *keys)).backward()
        gradients.append(gradients_of(model))
    return farthest(*gradients)


def interpreted():
    cases = [([5, 3, 11], 24), ([1], 8), ([4, 17], 520), ([9], 20)]  # 520: two blocks of columns; 20: half a draw
    networks = [network_error(checkpointing) for checkpointing in (False, True)]
    return [number for case in cases for number in differences("cpu", torch.float32, *case)] + networks


def test_the_interpreted_kernels_drop_the_same_numbers_as_pytorch():
    *errors, plain, checkpointed = interpreted_errors()["tests.nn.kernels.test_dropout"]
    assert len(errors) == 2 * 4
    assert not any(errors[::2])
    assert max(errors[1::2]) < 1e-5
    assert max(plain, checkpointed) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("width", [512, 768, 2048, 3072])
@pytest.mark.parametrize("dtype, most", [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_the_kernels_on_a_gpu_drop_the_same_numbers_as_pytorch(width, dtype, most):
    dropped, error = differences("cuda", dtype, [500, 3, 1200], width)
    assert dropped == 0
    assert error < most
