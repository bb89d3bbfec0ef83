"""Triton kernel: stochastic rounding to bf16, with the bits of model/nn/rounding.py."""

import triton
import triton.language as tl

from model.nn.kernels.dropout import _philox

NUMBERS = 2048  # of a program


def round_to_bf16(out, values, position, key):
    """As model.nn.rounding.round_to."""
    skipped = position % 8  # numbers of the first draw that are not there
    grid = (triton.cdiv(len(values) + skipped, NUMBERS),)
    round_forward[grid](values, out, key, position // 8, skipped, len(values), NUMBERS)


@triton.jit(do_not_specialize=["first_draw", "skipped", "count"])
def round_forward(VALUES, OUT, KEY, first_draw, skipped, count, NUMBERS: tl.constexpr):
    """Each program has NUMBERS positions from a multiple of 8 on."""
    k0, k1 = tl.load(KEY).to(tl.uint32, bitcast=True), tl.load(KEY + 1).to(tl.uint32, bitcast=True)
    draws = (first_draw + tl.program_id(0) * (NUMBERS // 8) + tl.arange(0, NUMBERS // 8)).to(tl.uint32)
    zeros = tl.zeros([NUMBERS // 8], tl.uint32)
    w0, w1, w2, w3 = _philox(draws, zeros, zeros, zeros, k0, k1)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape(NUMBERS // 2)  # w0, w1, w2, w3 side by side
    bits = tl.join(words & 0xFFFF, words >> 16).reshape(NUMBERS)
    places = tl.program_id(0) * NUMBERS + tl.arange(0, NUMBERS) - skipped
    is_real = (places >= 0) & (places < count)
    values = tl.load(VALUES + places, mask=is_real, other=0.0).to(tl.uint32, bitcast=True)
    rounded = ((values + bits) & 0xFFFF0000).to(tl.float32, bitcast=True)
    tl.store(OUT + places, rounded.to(OUT.dtype.element_ty), mask=is_real)
