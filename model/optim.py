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

    def load_state_dict(self, state_dict):
        """Read a state into the flat tensors."""
        mine = {p: dict(fields) for p, fields in self.state.items()}
        super().load_state_dict(state_dict)
        for p, fields in mine.items():
            for name, view in fields.items():
                view.copy_(self.state[p][name])
            self.state[p] = fields

    @torch.no_grad()
    def step(self):
        group = self.param_groups[0]
        rate, (beta1, beta2) = group["lr"], group["betas"]
        self.counts += 1
        rms = torch.stack(torch._foreach_norm(group["params"])) / self.root_sizes
        rates = rms.clamp(min=RMS_FLOOR) * (-rate / (1 - beta1 ** self.counts[0]))
        kept, root_correction = 1 - rate * group["weight_decay"], (1 - beta2 ** self.counts[0]).sqrt()
        self.update(rates, kept, root_correction, beta1, beta2, group["eps"])

    def update(self, rates, kept, root_correction, beta1, beta2, epsilon):
        """The pass over all weights: `rates` (tensors,) of each one's direction is added to what is `kept` of it."""
        if runs_kernels(self.weights):
            return self.update_in_one_pass(rates, kept, root_correction, beta1, beta2, epsilon)
        self.averages.lerp_(self.gradients, 1 - beta1)
        self.squares.mul_(beta2).addcmul_(self.gradients, self.gradients, value=1 - beta2)
        updates = self.averages / (self.squares.sqrt().div_(root_correction).add_(epsilon))
        torch._foreach_mul_(updates.split(self.sizes), list(rates.unbind()))
        self.weights.mul_(kept).add_(updates)

    def update_in_one_pass(self, rates, kept, root_correction, beta1, beta2, epsilon):
        from model.fused import update_adamw_rms  # a CPU build of torch comes without Triton

        tensors = (self.weights, self.gradients, self.averages, self.squares)
        update_adamw_rms(*tensors, self.tiles, rates, torch.stack([kept, root_correction]), beta1, beta2, epsilon)

    @functools.cached_property
    def tiles(self):
        from model.fused import update_tiles

        return update_tiles(self.sizes, self.weights.device)


STATE_FIELDS = {  # what each optimizer remembers of its weights
    RMSScaledAdamW: {"count", "exp_avg", "exp_avg_sq"},
    torch.optim.AdamW: {"step", "exp_avg", "exp_avg_sq"},
    torch.optim.Adafactor: {"step", "row_var", "col_var", "variance"},
}


def make_optimizer(model, config):
    """The optimizer that `config` names over the trainable weights.

    The learning rate lives in a tensor on the weights' device: `set_learn_rate` writes it.
    """
    params = [p for p in model.parameters() if p.requires_grad]
    decay, rate = config.weight_decay, torch.tensor(config.learn_rate, device=params[0].device)
    if config.optimizer == "adamw_rms":
        return RMSScaledAdamW(model.flat, rate, weight_decay=decay)
    if config.optimizer == "adamw":
        return torch.optim.AdamW(params, rate, weight_decay=decay, fused=True)
    # torch's Adafactor takes min(lr, 1/sqrt(step)): check_adafactor_rate refuses what it would not obey
    return torch.optim.Adafactor(params, rate, weight_decay=decay)


def set_learn_rate(optimizer, rate):
    """Write `rate` where the optimizer reads it, without waiting for the device."""
    for group in optimizer.param_groups:
        group["lr"].fill_(rate)


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
