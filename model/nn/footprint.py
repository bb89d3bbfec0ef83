"""What determines the bytes of a run besides the lengths of its examples and its plan."""

from dataclasses import dataclass
from functools import cached_property

from model.nn.base import Family


@dataclass(frozen=True)
class Constants:
    """Fitted constants: what counting tensors does not give."""

    reserved: float = 1.02  # bytes that the allocator reserves / bytes requested
    holes: float = 1.13  # more reserved bytes with checkpointing in plain PyTorch: its many sizes fragment memory
    workspace_bytes: float = 96 * 2**20  # cuBLAS workspaces, layouts, rounding


@dataclass(frozen=True)
class MemorySpec:
    """A network, how it computes and how it is trained."""

    family: Family
    model_config: object  # of the family's config_class
    number_bytes: int  # bytes per activation: 2 in bf16, 4 in float32
    kernels: bool  # attention runs in Triton kernels, else in plain PyTorch
    optimizer: str = "adamw_rms"
    dropout: bool = False
    part: str = "all"  # the part of the network that is trained, one of the family's parts
    launch_tokens: int = 5000  # tokens that the GPU computes in the time that launching a forward and backward takes
    constants: Constants = Constants()

    @cached_property
    def parameters(self):
        """Number of weights of the whole network."""
        return self.family.count_parameters(self.model_config)

    @cached_property
    def trained(self):
        """Number of weights that are trained."""
        return self.family.count_parameters(self.model_config, self.part)

    @cached_property
    def trained_matrix_numbers(self):
        """Number of weights that are trained in the layers' matrices."""
        return self.family.count_matrix_numbers(self.model_config, self.part)
