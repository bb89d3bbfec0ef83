"""What every optimizer is to the rest of the project: a state over flat weights, its bytes, and an update."""

from model.nn.flat_params import runs_kernels


class FlatOptimizer:
    """An optimizer over the trained weights of a FlatParams; one keeps the learning rate in a tensor on the device.

    Weight decay is decoupled (Loshchilov and Hutter 2019, arXiv 1711.05101): w <- w - r (u + weight_decay w), where r u
    is the update. r is the learning rate of the tensor: `lr`, times max(1e-3, RMS of the tensor) where an optimizer's
    steps are relative to it. So a number means the same in all of them, and the decay weakens as a tensor shrinks; `lr`
    alone would shrink it e-fold every 1 / (lr weight_decay) steps, while steps that shrink with it change it as much as
    ever. Only the layers' matrices decay: norms and biases are few and have their scale to learn, and in the embedding
    a rare token has nothing but decay between two updates (OLMo 2, arXiv 2501.00656, leaves it out too).

    An optimizer defines `fields`, `needed_bytes` and `apply`, and what else differs from here. It has `weights` and
    `gradients`, flat tensors: of the rank's own part of the FlatParams, where ranks share them. `param_groups` and
    `state` are as those of torch.optim.Optimizer, whose constructor imports 870 modules in two seconds.
    """

    fields = frozenset()  # names of the state of a weight
    count_field = "count"  # that of them which is one number
    # (numbers of each tensor, ranks) -> where the parts of the ranks end that can share masters and state; None: they
    # cannot
    part_ends = None
    average = None  # WeightAverage of the weights, where one is wanted; a step's commit updates it

    def __init__(self, params, options):
        self.param_groups, self.state = [options | dict(params=list(params))], {}

    @staticmethod
    def needed_bytes(trained, matrix_numbers):
        """(bytes of state, bytes of an update's temporaries) for so many weights, of which some are in matrices."""
        raise NotImplementedError

    @classmethod
    def fields_of(cls, is_matrix):
        """Names of the state of a layer's matrix, or of another weight."""
        return cls.fields

    @staticmethod
    def kernel_shapes(shapes):
        """Those of the matrices' `shapes` whose updates need kernels of their own."""
        return []

    @property
    def obeys_scale(self):
        """True if an update changes nothing unless its scale is above 0, and can be captured as a CUDA graph."""
        return runs_kernels(self.weights)

    def update(self, rate, scale, apply=None):
        """Update the weights at learning rate `rate` with `scale` times the flat gradients, which may change.

        `scale` is a 0-dim tensor on the device, so the host does not wait for it. `apply` replaces the optimizer's own,
        as a CUDA graph of it does.
        """
        for group in self.param_groups:
            group["lr"].fill_(rate)
        self.next_step()
        (apply or self.apply)(scale)

    def next_step(self):
        """Count a step on the host, where `apply` needs its number."""

    def apply(self, scale):
        """The update, after `next_step`; where it `obeys_scale`, it reads nothing of the host."""
        raise NotImplementedError

    def count_steps(self):
        """Set the host's number of steps, if it has one, to that of the state."""

    def reset(self):
        """Zero the state in place, as before the first update."""
        for fields in self.state.values():
            for value in fields.values():
                value.zero_()
        self.count_steps()
