"""The kernel of decoding against the plain path in float64: on a CPU in Triton's interpreter, on a GPU as it is."""

import pytest
import torch

from model.nn.key_values import KeyValues
from model.nn.t5.decode import Cache, _plain_attentions
from tests.nn.kernels.interpreted import interpreted_errors, relative_error

HEADS, LAYERS, TOKENS = 2, 1, 136
USED = (0, 1, 64, 150)  # tokens of the slots: none, as many as a load takes, more than there is room for


def errors(device, dtype, width):
    """Relative errors of the outputs to own and to input tokens of each layer, and of the cache afterwards."""
    from model.nn.kernels.decode_attention import attend_one

    used = torch.tensor(USED, device=device)
    sizes = (LAYERS, 2, len(USED), HEADS, TOKENS, width)
    own, cross = (torch.randn(sizes, device=device).to(dtype) for _ in range(2))
    bias = torch.randn(LAYERS, HEADS, TOKENS, device=device).to(dtype)
    qkv = torch.randn(len(USED), 3 * HEADS * width, device=device).to(dtype) / width**0.25
    inputs = used.clamp(1, TOKENS)
    exact = Cache(KeyValues(own.double(), used.clone()), KeyValues(cross.double(), inputs), bias.double())
    to_own, to_inputs = _plain_attentions(exact)
    q, found = qkv[:, : HEADS * width], []
    for layer in range(LAYERS):
        ours = attend_one(qkv, own[layer], used, bias[layer]), attend_one(q, cross[layer], inputs)
        theirs = to_own(layer, (qkv.double(),)), to_inputs(layer, (q.double(),))
        found += map(relative_error, ours, theirs)
    return [*found, relative_error(own, exact.own.kept)]


def interpreted():
    return [*errors("cpu", torch.float32, 16), *errors("cpu", torch.float32, 24)]


def test_the_interpreted_kernel_attends_as_the_plain_path_and_adds_the_token_to_the_cache():
    found = interpreted_errors()["tests.nn.kernels.test_decode_attention"]
    assert len(found) == 6 and max(found) < 1e-5


@pytest.mark.gpu
def test_the_kernel_in_bf16_is_within_one_percent_of_float64():
    for width in (16, 32, 64, 96, 128):
        assert max(errors("cuda", torch.bfloat16, width)) < 1e-2
