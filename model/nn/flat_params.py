"""A model's weights in flat tensors: float32 masters, their gradients, and copies in the compute dtype.

The cast, the all-reduce and the optimizer each work on one tensor. Adjacent weights (q, k and v) act as one matrix in
a matmul. Backward adds gradients to the flat tensor in float32, so they accumulate over micro-batches. A frozen weight
has neither master nor gradient: it is held once. Ranks may share the masters: each then holds those of its part.
"""

import functools
from importlib.util import find_spec

import torch
import torch.nn.functional as F

from model.nn.products import product
from model.nn.quantized import make_packed, merge_packed
from model.nn.weight_parts import weight_parts

NUM_SUMS = 16  # metrics of an objective, at most
VOCABULARY_MULTIPLE = 64  # rows of a padded table: a GPU's matmul with an odd number is several times slower


class FlatParams:
    """Makes a model's parameters views of a few tensors and their gradients views of another.

    Each parameter gets `.grad` (None if it is frozen) and `.copy`, its value in the compute dtype as of the last
    `refresh`. The rows of `tables`, which are among `others`, are padded with zeros. Masters and gradients share one
    order: `others` before the layers' `matrices`, which are sorted by shape. Frozen tables, matrices and `biases` (also
    among `others`) are held in the compute dtype, other frozen weights in float32. With `packs` a frozen matrix is a
    shape without memory, and has NF4's codes in `.packed` instead of a `.copy`. `sums`, an objective's metrics, follow
    the gradients, so that a sum over ranks covers both; `beside` are those that are in float32 where `gradients` are in
    bf16, with a GradientRounding as `rounding`. `parts` are WeightParts, more than one where ranks share the
    masters; `own` is this rank's, which `masters` and `own_gradients` are of. With `will_share` the masters lie where
    the gradients will, until weight_parts.share; with `will_round` they are the copies, and the gradients take no
    memory until bf16_gradients.hold_rounded.
    """

    def __init__(
        self, others, matrices, tables, compute_dtype, packs=False, biases=(), will_share=False, will_round=False
    ):
        tables = {id(p) for p in tables}
        params = [*others, *sorted(matrices, key=lambda p: p.shape)]
        self.trained = [p for p in params if p.requires_grad]
        self.trained_sizes = [_padded_size(p, tables) for p in self.trained]
        self.num_others = sum(p.requires_grad for p in others)  # the first of `trained`
        device, total = params[0].device, sum(self.trained_sizes)
        count = total + NUM_SUMS
        self.gradients_and_sums = torch.zeros(1 if will_round else count, device=device).expand(count)
        self.gradients, self.sums = self.gradients_and_sums.split((total, NUM_SUMS))
        self.beside, self.rounding = self.sums, None  # bf16_gradients.hold_in_bf16 makes others
        is_cast = compute_dtype != torch.float32
        self.copies = torch.zeros(total, device=device, dtype=compute_dtype)
        self.masters = self.copies
        if is_cast and not will_round:
            self.masters = self.gradients if will_share else torch.zeros(total, device=device)
        flats = (x.split(self.trained_sizes) for x in (self.masters, self.copies, self.gradients))
        for p, master, copy, gradient in zip(self.trained, *flats, strict=True):
            p.data, p.copy, p.rounding = _view_as(p, master).copy_(p.data), _view_as(p, copy), None
            p.grad = None if will_round else _view_as(p, gradient)
        frozen = [p for p in params if not p.requires_grad]
        packed = {id(p) for p in frozen if packs} & {id(p) for p in matrices}
        in_compute_dtype = tables | {id(p) for p in (*matrices, *biases)}
        self.read_whole = [p for p in self.trained if id(p) not in in_compute_dtype]  # by the network, in float32
        self.parts, self.rank, self.whole = weight_parts(self, [total]), 0, None
        self.is_apart = self.is_offloaded = False  # weight_parts.share makes them so
        self.frozen = [
            _hold([p for p in frozen if id(p) in in_compute_dtype - packed], tables, compute_dtype, device),
            _hold([p for p in frozen if id(p) not in in_compute_dtype], tables, torch.float32, device),
            *_pack([p for p in frozen if id(p) in packed], compute_dtype, device),
        ]

    @property
    def is_shared(self):
        return len(self.parts) > 1

    @property
    def own(self):
        """The WeightPart that this rank updates."""
        return self.parts[self.rank]

    @property
    def own_gradients(self):
        return self.gradients[self.own.start : self.own.stop]

    @property
    def weights(self):
        """The flat tensors that hold the model's weights: the masters, and the frozen weights of each dtype.

        Where the masters are apart, the copies in their place, and the weights that are read in float32.
        """
        trained = (self.copies, self.whole) if self.is_apart else (self.masters,)
        return [flat for flat in (*trained, *self.frozen) if flat is not None and len(flat)]

    def zero_gradients(self):
        """Zero the gradients and the metrics' sums."""
        self.gradients.zero_()
        self.beside.zero_()

    def gradient_norms(self, ranges):
        """Norms of these ranges (start, stop) of the gradients; in bf16, also of what is `beside` them."""
        flats = [self.gradients[start:stop] for start, stop in ranges] + [self.beside] * bool(self.rounding)
        return torch.stack([norm(flat) for flat in flats])

    def refresh(self):
        """Copy the masters to the copies in the compute dtype; where they are apart, the update has done it."""
        if self.masters.dtype != self.copies.dtype and not self.is_apart:
            self.copies.copy_(self.masters)


def norm(flat):
    """The norm of a tensor, in float32."""
    return torch.linalg.vector_norm(flat, dtype=torch.float32)


def _hold(params, tables, dtype, device):
    """Make frozen parameters views of one tensor of `dtype`, which is returned."""
    sizes = [_padded_size(p, tables) for p in params]
    flat = torch.zeros(sum(sizes), device=device, dtype=dtype)
    for p, part in zip(params, flat.split(sizes), strict=True):
        p.grad, p.data = None, _view_as(p, part).copy_(p.data)
        p.copy = p.data
    return flat


def _pack(params, dtype, device):
    """Give frozen matrices a place in flat tensors of NF4's codes, which are returned.

    A matrix without memory of its own, a view of one number, is written later.
    """
    flats, places = make_packed([p.shape for p in params], device)
    for p, place in zip(params, places, strict=True):
        assert not hasattr(p, "packed") or p.packed.codes.is_meta, "a network with packed matrices stays where it is"
        if not p.is_meta and p.stride() != (0, 0):
            place.write(p.data)
        p.grad, p.data, p.packed = None, torch.zeros(1, dtype=dtype, device=device).expand(p.shape), place
    return flats


def _padded_size(p, tables):
    return padded_rows(len(p)) * p.shape[1] if id(p) in tables else p.numel()


def padded_rows(rows):
    return -(-rows // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


def _view_as(p, flat):
    return flat[: p.numel()].view(p.shape)


def with_padding(view):
    """A table's `.copy` or `.grad`, (vocabulary, width), extended by its padding rows of zeros."""
    return view.as_strided((padded_rows(len(view)), view.shape[1]), view.stride(), view.storage_offset())


def merge_adjacent(views):
    """View of adjacent matrices of the same width as one matrix (sum of their rows, width); or of adjacent vectors."""
    first, rows = views[0], sum(map(len, views))
    assert views[-1].storage_offset() + views[-1].numel() == first.storage_offset() + rows * first.stride(0)
    return first.as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())


def linear(x, *weights, biases=(), masks=None):
    """x @ torch.cat(weights).T + torch.cat(biases), (N, width) to (N, sum of their rows).

    `weights` are adjacent in the flat tensor, and so are `biases`, if there are any. A weight may have an adapter
    (model/nn/lora.py) as an attribute; its dropout needs the `masks` of x's tokens.
    """
    return linears(x, [(weights, biases)], masks)[0]


def linears(x, layers, masks=None):
    """[linear of each of `layers`, a list of (weights, biases)]; the products of backward sum their gradients of x."""
    if any(hasattr(weight, "adapter") for weights, _ in layers for weight in weights):
        return [_adapted_linear(x, weights, biases, masks) for weights, biases in layers]
    if not torch.is_grad_enabled():  # a Function costs a tenth of a token's time on a CPU
        return [product(x, matrix_of(weights), bias_of(biases)) for weights, biases in layers]
    return _Linears.apply(x, layers, *(p for weights_and_biases in layers for some in weights_and_biases for p in some))


def _adapted_linear(x, weights, biases, masks):
    for weight in weights:
        if hasattr(weight, "adapter"):
            return weight.adapter.linear(x, weights, biases, masks)
    return linears(x, [(weights, biases)])[0]


def matrix_of(weights):
    """Adjacent weights in the compute dtype, as one matrix (sum of their rows, width); from NF4 it is a temporary."""
    if hasattr(weights[0], "packed"):
        dtype = weights[0].dtype
        return merge_packed([weight.packed for weight in weights]).read(dtype, runs_kernels(weights[0].packed.codes))
    return merge_adjacent([weight.copy for weight in weights])


def bias_of(biases):
    """Adjacent biases in the compute dtype, as one vector; None if there are none."""
    return merge_adjacent([bias.copy for bias in biases]) if biases else None


class _Linears(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, layers, *weights_and_biases):
        is_trained = any(weights[0].requires_grad for weights, _ in layers)
        ctx.save_for_backward(x if is_trained else None)  # a frozen weight needs no x
        ctx.layers, ctx.num_parameters = layers, len(weights_and_biases)
        return tuple(F.linear(x, matrix_of(weights), bias_of(biases)) for weights, biases in layers)

    @staticmethod
    def backward(ctx, *grads):
        (x,), grad_x = ctx.saved_tensors, None
        for grad, (weights, biases) in zip(grads, ctx.layers, strict=True):
            if ctx.needs_input_grad[0]:
                matrix = matrix_of(weights)
                grad_x = grad @ matrix if grad_x is None else grad_x.addmm_(grad, matrix)
            if weights[0].requires_grad:
                add_product(weights, grad.T, x)
            if biases and biases[0].requires_grad:
                add_values(biases, grad.sum(0, dtype=torch.float32))
        # backward has already added the gradients to w.grad and b.grad
        return grad_x, None, *(None for _ in range(ctx.num_parameters))


def split_qkv(qkv, num_heads=1, num_kv_heads=1):
    """[q, k, v] as views of the one to three tensors whose concatenated columns they are."""
    head_width = sum(x.shape[1] for x in qkv) // (num_heads + 2 * num_kv_heads)
    widths = [num_heads * head_width, num_kv_heads * head_width, num_kv_heads * head_width]
    parts = []
    for x in qkv:
        own = []
        while sum(own) < x.shape[1]:
            own.append(widths[len(parts) + len(own)])
        parts += x.split(own, dim=1)
    return parts


def add_product(weights, a, b):
    """Add a @ b to the gradients of adjacent matrices."""
    total, rounding = merge_adjacent([weight.grad for weight in weights]), weights[0].rounding
    (rounding.add_product if rounding else add_matmul)(total, a, b)


def add_values(weights, values):
    """Add `values`, float32, which may change, to the gradients of adjacent weights."""
    total, rounding = merge_adjacent([weight.grad for weight in weights]), weights[0].rounding
    (rounding.add if rounding else torch.Tensor.add_)(total, values)


def add_matmul(total, a, b):
    """total += a @ b, accumulated in the dtype of `total` (float32), whatever the dtype of a and b.

    All are matrices, or all are batches of matrices.
    """
    if a.dtype == total.dtype:
        (total.addmm_ if total.dim() == 2 else total.baddbmm_)(a, b)
    elif total.is_cuda:
        (torch.addmm if total.dim() == 2 else torch.baddbmm)(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


def runs_kernels(x):
    """True if Triton kernels can run on `x`."""
    return x.is_cuda and has_triton()


@functools.cache
def has_triton():
    """True if the package triton is installed; a CPU build of torch comes without it."""
    return find_spec("triton") is not None
