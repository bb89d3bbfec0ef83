"""Optimizers, and the learning rate as a pure function of the pairs seen."""

import functools
import math

import torch

from model.weights import runs_kernels

RMS_FLOOR = 1e-3  # Adafactor's eps2 (Shazeer and Stern 2018): a tensor near zero still moves


class RMSScaledAdamW(torch.optim.Optimizer):
    """AdamW whose step for each tensor is multiplied by max(1e-3, RMS of the tensor).

    T5 diverges under plain AdamW at the rates Adafactor allows; its parameter scaling is what helps
    (nanoT5, github.com/PiotrNawrot/nanoT5, optimizer AdamWScale). Over the trained weights of a FlatWeights, whose
    layout its averages share: one pass over memory on a GPU. `lr` is a tensor on the weights' device, so that a step
    never waits for it.
    """

    def __init__(self, flat, lr, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.0):
        super().__init__(flat.trained, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        self.weights, self.gradients = flat.masters[: len(flat.gradients)], flat.gradients
        self.averages, self.squares = torch.zeros_like(self.gradients), torch.zeros_like(self.gradients)
        self.counts = torch.zeros(len(flat.trained), device=lr.device)
        self.root_sizes = torch.tensor([p.numel() ** 0.5 for p in flat.trained], device=lr.device)
        self.sizes = flat.trained_sizes
        fields = (self.counts.unbind(), self.averages.split(self.sizes), self.squares.split(self.sizes))
        for p, count, average, square in zip(flat.trained, *fields, strict=True):
            average, square = (x[: p.numel()].view(p.shape) for x in (average, square))
            self.state[p] = dict(count=count, exp_avg=average, exp_avg_sq=square)
        self.num_steps = 0  # as `counts`, which checkpoints hold

    def load_state_dict(self, state_dict):
        """Read a state into the flat tensors."""
        mine = {p: dict(fields) for p, fields in self.state.items()}
        super().load_state_dict(state_dict)
        for p, fields in mine.items():
            for name, view in fields.items():
                view.copy_(self.state[p][name])
            self.state[p] = fields
        self.num_steps = int(self.counts[0])

    @torch.no_grad()
    def step(self, scale=None):
        """One update with `scale` (0-dim, on the device; None: 1) times the gradients, which it may change."""
        group = self.param_groups[0]
        scale = torch.ones_like(group["lr"]) if scale is None else scale
        betas, self.num_steps = group["betas"], self.num_steps + 1
        self.counts += 1
        corrections = [1 - beta**self.num_steps for beta in betas]
        update = self.update_in_one_pass if runs_kernels(self.weights) else self.update
        update(group["lr"], scale, *betas, *corrections, group["eps"], group["weight_decay"])

    def update(self, rate, scale, beta1, beta2, correction1, correction2, epsilon, weight_decay):
        gradients = scale_(self.gradients, scale)
        self.averages.lerp_(gradients, 1 - beta1)
        self.squares.mul_(beta2).addcmul_(gradients, gradients, value=1 - beta2)
        updates = self.averages / (self.squares.sqrt().div_(math.sqrt(correction2)).add_(epsilon))
        rms = torch.stack(torch._foreach_norm(self.param_groups[0]["params"])) / self.root_sizes
        rates = rms.clamp(min=RMS_FLOOR) * (-rate / correction1)
        torch._foreach_mul_(updates.split(self.sizes), list(rates.unbind()))
        self.weights.mul_(1 - rate * weight_decay).add_(updates)

    def update_in_one_pass(self, *numbers):
        from model.fused import update_adamw_rms  # a CPU build of torch comes without Triton

        tensors = (self.weights, self.gradients, self.averages, self.squares)
        update_adamw_rms(*tensors, self.tiles, *numbers, RMS_FLOOR)

    @functools.cached_property
    def tiles(self):
        from model.fused import update_tiles

        return update_tiles(self.sizes, [p.numel() for p in self.param_groups[0]["params"]], self.weights.device)


STATE_FIELDS = {  # what each optimizer remembers of its weights
    RMSScaledAdamW: {"count", "exp_avg", "exp_avg_sq"},
    torch.optim.AdamW: {"step", "exp_avg", "exp_avg_sq"},
    torch.optim.Adafactor: {"step", "row_var", "col_var", "variance"},
}


def make_optimizer(model, config):
    """The optimizer that `config` names over the trainable weights.

    The learning rate lives in a tensor on the weights' device: `update` writes it.
    """
    params = [p for p in model.parameters() if p.requires_grad]
    decay, rate = config.weight_decay, torch.tensor(config.learn_rate, device=params[0].device)
    if config.optimizer == "adamw_rms":
        return RMSScaledAdamW(model.flat, rate, weight_decay=decay)
    if config.optimizer == "adamw":
        return torch.optim.AdamW(params, rate, weight_decay=decay, fused=True)
    # torch's Adafactor takes min(lr, 1/sqrt(step)): check_adafactor_rate refuses what it would not obey
    return torch.optim.Adafactor(params, rate, weight_decay=decay)


def forget(optimizer):
    """Make the optimizer's state that of no update at all, without giving its memory up."""
    for fields in optimizer.state.values():
        for value in fields.values():
            if isinstance(value, torch.Tensor):
                value.zero_()
    if isinstance(optimizer, RMSScaledAdamW):
        optimizer.num_steps = 0


def update(optimizer, gradients, rate, scale):
    """Update the weights at learning rate `rate` with `scale` times the flat `gradients`, which it may change.

    Both are 0-dim tensors on the device, where nothing waits for them. A scale of 0 means no gradient, whatever it is.
    """
    for group in optimizer.param_groups:
        group["lr"].fill_(rate)
    if isinstance(optimizer, RMSScaledAdamW):
        optimizer.step(scale)
    else:
        scale_(gradients, scale)
        optimizer.step()


def scale_(gradients, scale):
    """`gradients` times `scale` in place, 0 for a scale of 0 even where they are not finite."""
    return gradients.mul_(scale).masked_fill_(scale == 0, 0.0)


def learn_rate_at(pairs_seen, config, warmup_pairs, total_pairs):
    """Learning rate when `pairs_seen` pairs are done: up to the peak over `warmup_pairs`, down to 0 at `total_pairs`.

    cosine: half a cosine from the peak to 0. wsd: the peak, then a straight line to 0 over the last fifth
    (warm-up, stable, decay: MiniCPM, arXiv 2404.06395).
    """
    if pairs_seen < warmup_pairs:
        return config.learn_rate * pairs_seen / warmup_pairs
    if config.lr_schedule == "cosine":
        progress = (pairs_seen - warmup_pairs) / max(total_pairs - warmup_pairs, 1)
        return config.learn_rate * (1 + math.cos(math.pi * min(progress, 1.0))) / 2
    left = max(total_pairs - pairs_seen, 0) / total_pairs
    return config.learn_rate * min(left / 0.2, 1.0)


def check_adafactor_rate(config, warmup_pairs, total_pairs, global_batch):
    """Raise ValueError where torch's Adafactor would use a lower rate than the one set: it caps it at 1/sqrt(step)."""
    room, step, rate = min(_room_under_cap(config, warmup_pairs, total_pairs, global_batch, i) for i in range(1, 1001))
    if room < 1:
        raise ValueError(
            f"learn_rate={config.learn_rate} asks for {rate:.2g} at step {step:.0f}, where torch's Adafactor uses at "
            f"most 1/sqrt(step) = {rate * room:.2g}: type --learn_rate={0.95 * room * config.learn_rate:.2g}"
        )


def _room_under_cap(config, warmup_pairs, total_pairs, global_batch, thousandths):
    """(the cap over the rate, step, rate) after so many thousandths of the course."""
    pairs = total_pairs * thousandths / 1000
    step, rate = max(pairs / global_batch, 1), learn_rate_at(pairs, config, warmup_pairs, total_pairs)
    return step**-0.5 / rate if rate else math.inf, step, rate
