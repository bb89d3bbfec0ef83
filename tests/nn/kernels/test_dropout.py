"""The kernels' dropout against PyTorch's: on a CPU in Triton's interpreter, on a GPU as it is."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from model.data.buckets import Bucket
from tests.nn.kernels.interpreted import interpreted_errors, relative_error

IDS = [5, 2**31 + 1, 2**33 + 7]
NAMES = "dropout", "grad", "sum", "relu", "relu grad", "stream", "normed", "grad x", "grad added", "grad weight"
SHAPE = dict(d_model=24, d_ff=40, num_heads=1, d_kv=16, num_layers=1, num_decoder_layers=1)
BUCKET = Bucket((32, 48), 3)
NETWORKS = dict(packed=(), padded_and_checkpointed=(BUCKET, True))


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
        values += [relu, relu_drop_backward(grad.clone(), relu, masks.scale)]
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
    # the others are sums, which rounding may make zero
    dropped = sum(int(((ours[i] == 0) != (reference[i] == 0)).sum()) for i in (0, 1, 3, 4))
    is_dropped = (reference[0] == 0) & (reference[1] == 0)  # a drawn number may be 0 too, but not both
    dropped += int(((ours[8] != 0) & is_dropped).sum())
    assert len(ours) == len(reference) == len(NAMES)
    return [dropped, max(relative_error(*pair) for pair in zip(ours, reference, strict=True))]


def network_errors():
    """Largest relative distance, for each of NETWORKS, of the gradients of a T5 in the kernels from PyTorch's.

    For a process of its own: it replaces functions.
    """
    from model.data.sequences import Sequences
    from model.nn import dropout, layers
    from model.nn.base import Packing
    from model.nn.t5.batch import collate
    from tests.parts import farthest, gradients_of, make_model

    lengths = np.array([[3, 5], [9, 2], [4, 11]])
    columns = tuple(np.random.default_rng(0).integers(1, 500, column.sum()) for column in lengths.T)
    sequences, model = Sequences(columns, lengths, ids=np.array(IDS)), make_model(500, shape=SHAPE, dropout=0.2)
    model.key_dropout(3, 2**40)

    def gradients(kernels, bucket=None, checkpointing=0):
        layers.runs_kernels = dropout.runs_kernels = lambda _: kernels
        model.gradient_checkpointing = checkpointing
        model.zero_grad()
        model(collate(sequences, Packing(0, kernels, bucket, num_sequences=3, dropout=True))).backward()
        return gradients_of(model)

    expected = gradients(kernels=False)
    return [farthest(gradients(True, *network), expected) for network in NETWORKS.values()]


def interpreted():
    cases = [([5, 3, 11], 24), ([1], 8), ([4, 17], 520), ([9], 20)]  # 520: two blocks of columns; 20: half a draw
    return [number for case in cases for number in differences("cpu", torch.float32, *case)] + network_errors()


def test_the_interpreted_kernels_drop_the_same_numbers_as_pytorch():
    errors = interpreted_errors()["tests.nn.kernels.test_dropout"][: -len(NETWORKS)]
    assert len(errors) == 2 * 4
    assert not any(errors[::2])
    assert max(errors[1::2]) < 1e-5


@pytest.mark.parametrize("number, name", list(enumerate(NETWORKS)))
def test_promise_2_dropout_has_the_same_gradient_in_the_kernels_padded_or_checkpointed(number, name):
    assert interpreted_errors()["tests.nn.kernels.test_dropout"][number - len(NETWORKS)] < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("width", [512, 768, 2048, 3072])
@pytest.mark.parametrize("dtype, most", [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_the_kernels_on_a_gpu_drop_the_same_numbers_as_pytorch(width, dtype, most):
    dropped, error = differences("cuda", dtype, [500, 3, 1200], width)
    assert dropped == 0
    assert error < most
