"""LoRA: a frozen matrix W acts as W + s B A, with trained factors A (rank, inputs) and B (outputs, rank).

Hu et al. 2021 (arXiv 2106.09685): s = alpha / rank. rsLoRA (Kalajdzievski 2023, arXiv 2312.03732): s = alpha /
sqrt(rank). A layer's factors are its submodules `lora_A` and `lora_B`, as in PEFT.
"""

from collections import Counter
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache

import torch

from config import MAX_LORA_RANK
from model.nn.adapted_product import AdaptedProduct, adapted_product
from model.nn.dropout import MAX_SITES, NO_DROPOUT
from model.nn.layers import Linear

FACTORS = ("lora_A", "lora_B")
FIRST_SITE = MAX_SITES // 2  # of dropout in adapters; a network's own sites are below


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """An adapter, and the frozen weights that it needs. ValueError for values that no adapter has."""

    rank: int
    alpha: float
    targets: tuple  # linear layers: the last part of their names, or more of its end, as PEFT's target_modules
    dropout: float = 0.0  # probability, of the input of A
    use_rslora: bool = False
    base: str = ""  # directory of the frozen weights
    base_sha256: str = ""  # of their files; empty: unknown
    base_precision: str = "auto"  # how their matrices are held: auto (in the compute dtype), nf4

    def __post_init__(self):
        kinds = dict(rank=int, alpha=(int, float), targets=tuple, dropout=(int, float), use_rslora=bool)
        wrong = [
            name
            for name, kind in (kinds | dict(base=str, base_sha256=str, base_precision=str)).items()
            if not self._is(name, kind)
        ]
        right = not wrong and 0 < self.rank <= MAX_LORA_RANK and 0 <= self.alpha < 1e6 and 0 <= self.dropout < 1
        right = right and self.base_precision in ("auto", "nf4")
        if not right or not self.targets or not all(isinstance(name, str) for name in self.targets):
            values = ", ".join(f"{f.name}={getattr(self, f.name)!r:.80}" for f in fields(self))
            raise ValueError(
                f"an adapter's rank must be from 1 to {MAX_LORA_RANK}, its alpha a number of at least 0, its targets "
                f"names, its dropout in [0, 1), its base auto or nf4, not {values}"
            )

    def _is(self, name, kind):
        value = getattr(self, name)
        return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))

    @property
    def scale(self):
        return self.alpha / (self.rank**0.5 if self.use_rslora else self.rank)

    def adapts(self, name):
        """Whether the linear layer of this name has an adapter."""
        return any(name == target or name.endswith("." + target) for target in self.targets)


def lora_from(values):
    """The LoraConfig with these plain values, as from `lora_values`; ValueError or TypeError for wrong ones."""
    targets = values.get("targets")
    return LoraConfig(**values | dict(targets=tuple(targets) if isinstance(targets, list) else targets))


def lora_values(lora):
    """Plain values of a LoraConfig, for `lora_from`."""
    return asdict(lora) | dict(targets=list(lora.targets))


@dataclass(frozen=True)
class Adapter:
    """The factors of one matrix, on which it is an attribute: flat_params.linear then computes the product with it."""

    A: torch.nn.Parameter
    B: torch.nn.Parameter
    scale: float
    dropout: float
    site: int

    def linear(self, x, weights, biases, masks, has_relu=False):
        """x @ W.T + biases, through ReLU or not, for adjacent frozen weights, of which this is the first adapter."""
        product = AdaptedProduct(weights, biases, self._masks(masks), has_relu)
        return adapted_product(x, product)

    def _masks(self, masks):
        if not self.dropout or (masks is None and not torch.is_grad_enabled()):
            return NO_DROPOUT
        assert masks is not None, "a product with adapters needs the masks of its input: linear(…, masks=…)"
        drops = masks.token_keys is not None
        return replace(masks, probability=self.dropout, site=self.site) if drops else NO_DROPOUT


def attach(model, lora):
    """Freeze the model's weights and give it adapters, whose weights are not drawn yet; returns the model.

    Raises ValueError if a target names no linear layer.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, Linear)}
    for target in lora.targets:
        if not any(replace(lora, targets=(target,)).adapts(name) for name in layers):
            names = ", ".join(sorted({name.rpartition(".")[2] for name in layers}))
            raise ValueError(f"--lora_targets={target}: this network has no such linear layer: name some of {names}")
    model.requires_grad_(False)
    for number, layer in enumerate(layer for name, layer in layers.items() if lora.adapts(name)):
        num_out, num_in = layer.weight.shape
        with layer.weight.device:
            layer.lora_A, layer.lora_B = Linear(num_in, lora.rank, num_in**-0.5), Linear(lora.rank, num_out, 0.0)
        factors = layer.lora_A.weight, layer.lora_B.weight
        layer.weight.adapter = Adapter(*factors, lora.scale, lora.dropout, FIRST_SITE + number)
        assert FIRST_SITE + number < MAX_SITES
    model.lora = lora
    model.make_flat()
    return model


@torch.no_grad()
def draw(model, seed, init="uniform"):
    """The model with adapters drawn as PEFT draws them: A uniform in ±1 / sqrt(inputs) or gaussian, B zero.

    The standard deviation of a gaussian A is 1 / rank.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        if is_factor(name, "lora_A") and init == "gaussian":
            p.copy_(torch.randn(p.shape, generator=generator) / len(p))
        elif is_factor(name, "lora_A"):
            p.copy_((torch.rand(p.shape, generator=generator) * 2 - 1) * p.shape[1] ** -0.5)
        elif is_factor(name, "lora_B"):
            p.zero_()
    return model


def factor_kind(module_name):
    """lora_A or lora_B if a module of this name is such a factor, else ""."""
    last = module_name.rpartition(".")[2]
    return last if last in FACTORS else ""


def is_factor(name, *kinds):
    """Whether a tensor of this name is one of an adapter's factors, of these `kinds` (none: of any)."""
    return name.endswith(tuple(f".{kind}.weight" for kind in kinds or FACTORS))


@lru_cache(maxsize=64)
def count_adapter_numbers(family, model_config, lora):
    """Number of weights of an adapter."""
    with torch.device("meta"):  # takes no memory
        model = attach(family.build(model_config), lora)
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


@lru_cache(maxsize=64)
def largest_product(family, model_config):
    """The most numbers that matrices of one shape in one layer have together: they may be one matrix in a product."""
    together = Counter()
    with torch.device("meta"):  # takes no memory
        for name, module in family.build(model_config).named_modules():
            if isinstance(module, Linear):
                together[name.rpartition(".")[0], module.weight.shape] += module.weight.numel()
    return max(together.values())


def check_factors(tensors, factors):
    """Raise ValueError unless each pair of `factors` has a matrix of its shape in `tensors`; both {name: tensor}."""
    for name in (name for name in factors if is_factor(name, "lora_A")):
        stem = name.removesuffix("lora_A.weight")
        weight, shape = tensors.get(stem + "weight"), (len(factors[stem + "lora_B.weight"]), factors[name].shape[1])
        if weight is None or weight.shape != shape:
            found = "no" if weight is None else f"a {tuple(weight.shape)}"
            raise ValueError(f"the base has {found} {stem}weight, and the adapter needs {shape}")


@torch.no_grad()
def merged(name, weight, factors, lora):
    """The matrix of this name plus s B A, in float32, or `weight` itself if `factors` hold none of it."""
    A, B = (factors.get(name.removesuffix("weight") + f"{factor}.weight") for factor in FACTORS)
    return weight if A is None else torch.addmm(weight.float(), B.float(), A.float(), alpha=lora.scale)
