"""Optimizers, and the learning rate as a pure function of the pairs seen."""

import math

import torch

RMS_FLOOR = 1e-3  # Adafactor's eps2 (Shazeer and Stern 2018): a tensor near zero still moves


class RMSScaledAdamW(torch.optim.Optimizer):
    """AdamW whose step for each tensor is multiplied by max(1e-3, RMS of the tensor).

    T5 diverges under plain AdamW at the rates Adafactor allows; its parameter scaling is what helps
    (nanoT5, github.com/PiotrNawrot/nanoT5, optimizer AdamWScale). `lr` is a tensor on the weights' device, so
    that a step never waits for it. Every weight must have a gradient.
    """

    def __init__(self, params, lr, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.0):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        params = self.param_groups[0]["params"]
        self.root_sizes = torch.tensor([p.numel() ** 0.5 for p in params], device=lr.device)
        for p in params:
            self.state[p] = dict(
                count=torch.zeros((), device=lr.device), exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p)
            )

    @torch.no_grad()
    def step(self):
        group = self.param_groups[0]
        params, rate, (beta1, beta2) = group["params"], group["lr"], group["betas"]
        grads = [p.grad for p in params]
        counts, averages, squares = (
            [self.state[p][name] for p in params] for name in ("count", "exp_avg", "exp_avg_sq")
        )
        torch._foreach_add_(counts, 1)
        torch._foreach_lerp_(averages, grads, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
        denominators = torch._foreach_sqrt(squares)
        torch._foreach_div_(denominators, (1 - beta2 ** counts[0]).sqrt())
        torch._foreach_add_(denominators, group["eps"])
        updates = torch._foreach_div(averages, denominators)
        rms = torch.stack(torch._foreach_norm(params)) / self.root_sizes
        scales = rms.clamp(min=RMS_FLOOR) * (-rate / (1 - beta1 ** counts[0]))
        torch._foreach_mul_(updates, list(scales.unbind()))
        torch._foreach_mul_(params, 1 - rate * group["weight_decay"])
        torch._foreach_add_(params, updates)


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
        return RMSScaledAdamW(params, rate, weight_decay=decay)
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
