"""What the project's optimizers share with torch's: parameters in one group, and a state for each of them."""


class FlatOptimizer:
    """Parameters in one group, and a state for each of them, as torch.optim.Optimizer has.

    The constructor of torch's own imports 870 modules in two seconds.
    """

    def __init__(self, params, options):
        self.param_groups, self.state = [options | dict(params=list(params))], {}
