"""What determines the bytes of a run besides the lengths of its examples and its plan."""

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch

from model.nn.base import Family
from model.nn.layers import Linear
from model.nn.lora import LoraConfig, attach, count_adapter_numbers, largest_product
from model.nn.quantized import NUMBER_BYTES
from model.nn.weight_parts import weight_parts

LAUNCH_BLOCK_NUMBERS = 8_400_000  # weights of a block of chatlm, for whose launches MemorySpec.launch_tokens stands
ADAPTER_LAUNCHES = 2  # launches of a network with adapters / without
INPUTS_AT_ONCE = 2  # of recomputed blocks on the device, where model/nn/recomputation.py offloads them


@dataclass(frozen=True)
class Constants:
    """Fitted constants: what counting tensors does not give."""

    reserved: float = 1.02  # bytes that the allocator reserves / bytes requested
    holes: float = 1.13  # more reserved bytes with checkpointing in plain PyTorch: its many sizes fragment memory
    workspace_bytes: float = 96 * 2**20  # cuBLAS workspaces, layouts, rounding


@dataclass(frozen=True)
class Numbers:
    """How many weights a network, or a part of it, has."""

    weights: int
    matrices: int  # those in the layers' matrices


@lru_cache(maxsize=64)
def count_numbers(family, model_config, part="all"):
    """Numbers of the weights in a part of a network."""
    with torch.device("meta"):  # takes no memory
        model = family.build(model_config).freeze_all_but(part)
    matrices = (module.weight for module in model.modules() if isinstance(module, Linear))
    return Numbers(*(sum(p.numel() for p in ps if p.requires_grad) for ps in (model.parameters(), matrices)))


@dataclass(frozen=True)
class OwnPart:
    """The largest part of masters and state that a rank holds where ranks share them."""

    numbers: int  # trained weights
    state_bytes: int


@lru_cache(maxsize=64)
def part_numbers(spec, part_ends, num_ranks):
    """[(weights, those of them in the layers' matrices)] of each rank's part; `part_ends` is an optimizer's."""
    with torch.device("meta"):  # takes no memory
        model = spec.family.build(spec.model_config).freeze_all_but(spec.part)
        flat = (attach(model, spec.lora) if spec.lora else model).flat
    parts = weight_parts(flat, part_ends(flat.trained_sizes, num_ranks))
    numbers = [[piece.stop - piece.start for piece in part.pieces] for part in parts]
    return [(sum(own), sum(own[part.num_others :])) for own, part in zip(numbers, parts, strict=True)]


def blocks_bytes(layers, num_blocks, stream, num_recomputed, offloads=False):
    """(bytes kept by equal blocks, peak bytes during the backward of the last one), of kinds of examples each.

    `layers` holds (kept, temporaries) of each layer of a block. Of the first `num_recomputed` blocks only the input
    (`stream` bytes) is kept, and their backward computes the rest again. The last block is the peak unless it is one of
    them: then it is held beside all inputs, and else beside what other blocks keep too. With `offloads` at most
    INPUTS_AT_ONCE of the inputs are on the device.
    """
    num_recomputed, kept_by_layer = min(max(num_recomputed, 0), num_blocks), [kept for kept, _ in layers]
    inputs = min(num_recomputed, INPUTS_AT_ONCE) if offloads else num_recomputed
    kept, moments = inputs * stream + (num_blocks - num_recomputed) * sum(kept_by_layer), []
    for i, (_, temporaries) in enumerate(layers):
        recomputed = sum(kept_by_layer) if num_recomputed == num_blocks else 0
        moments.append(kept + recomputed - sum(kept_by_layer[i + 1 :]) + temporaries)
    return kept, np.max(moments, axis=0)


@dataclass(frozen=True)
class MemorySpec:
    """A network, how it computes and how it is trained."""

    family: Family
    model_config: object  # of the family's config_class
    number_bytes: int  # bytes per activation: 2 in bf16, 4 in float32
    kernels: bool  # attention runs in Triton kernels, else in plain PyTorch
    dropout: bool = False
    part: str = "all"  # the part of the network that is trained, one of the family's parts
    lora: LoraConfig | None = None  # an adapter that is trained instead
    state_bytes: int = 0  # the optimizer's state, as a checkpoint holds it
    update_bytes: int = 0  # temporaries of its update
    has_masters: bool = True  # in float32, of the weights that are trained
    offloads: bool = False  # masters and state are in host memory
    offloads_inputs: bool = False  # of recomputed blocks
    own_part: OwnPart | None = None  # of masters and state that ranks share; None: each rank holds all
    averages: bool = False  # whether an average of the trained weights is held beside them
    sum_bytes: int = 0  # buffers of the sum of gradients over ranks
    num_ranks: int = 1  # that share a step
    teachers: tuple = ()  # MemorySpecs of networks that only run forward, in training
    # tokens of a network of small blocks that the GPU computes in the time that launching a forward and backward takes
    launch_tokens: int = 5000
    constants: Constants = Constants()

    @cached_property
    def network_launch_tokens(self):
        """`launch_tokens` of this network: a block of more weights computes longer; adapters take more launches."""
        numbers = count_numbers(self.family, self.model_config).matrices / self.model_config.num_blocks
        launches = ADAPTER_LAUNCHES if self.lora else 1
        return self.launch_tokens * launches * min(LAUNCH_BLOCK_NUMBERS / numbers, 1)

    @cached_property
    def parameters(self):
        """Number of weights of the whole network, adapters included."""
        adapter = self.trained if self.lora else 0
        return count_numbers(self.family, self.model_config).weights + adapter

    @cached_property
    def trained(self):
        """Number of weights that are trained."""
        if self.lora:
            return count_adapter_numbers(self.family, self.model_config, self.lora)
        return count_numbers(self.family, self.model_config, self.part).weights

    @property
    def gradient_bytes(self):
        """Bytes of the gradient of a weight, which without masters is in bf16."""
        return 4 if self.has_masters else self.number_bytes

    @property
    def can_capture(self):
        """Whether steps can be captured as CUDA graphs, which hold all that they use on the device."""
        return self.kernels and not self.offloads_inputs

    @property
    def offloaded_bytes(self):
        """Bytes of masters and state that a rank has in host memory."""
        own = self.own_part or OwnPart(self.trained, self.state_bytes)
        return (4 * own.numbers * self.has_masters + own.state_bytes) * self.offloads

    @property
    def average_bytes(self):
        """Bytes of the trained weights' average, on the device and again in a save's host memory."""
        return 4 * self.trained if self.averages else 0

    @cached_property
    def trained_matrix_numbers(self):
        """Number of weights that are trained in the layers' matrices."""
        return self.trained if self.lora else count_numbers(self.family, self.model_config, self.part).matrices

    @cached_property
    def frozen_bytes(self):
        """Bytes of the weights that are not trained."""
        frozen = self.parameters - self.trained
        if not self.is_packed:
            return frozen * self.number_bytes
        matrices = count_numbers(self.family, self.model_config).matrices
        return int(matrices * NUMBER_BYTES + (frozen - matrices) * self.number_bytes)

    @cached_property
    def product_bytes(self):
        """Bytes of the largest matrix that a product makes: with its adapters added, taken out of NF4 or not."""
        return largest_product(self.family, self.model_config) * self.number_bytes if self.lora else 0

    @property
    def teacher_bytes(self):
        """Bytes of the teachers' weights."""
        return sum(teacher.parameters * teacher.number_bytes for teacher in self.teachers)

    @property
    def is_packed(self):
        return self.lora is not None and self.lora.base_precision == "nf4"

    @property
    def saved(self):
        """Number of weights that a checkpoint and an export hold."""
        return self.trained if self.lora else self.parameters
