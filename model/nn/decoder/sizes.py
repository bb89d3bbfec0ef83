"""DecoderModelConfig: sizes and variant of a decoder, under the names of transformers' configurations."""

from dataclasses import dataclass, fields

from config import MAX_LAYERS, MAX_VOCAB_SIZE, MAX_WIDTH

DECODER_TYPES = ("qwen2", "qwen3", "llama")
# What scales rotary positions for longer sequences: the numbers of a config.json that it needs, and those it may have
ROPE_SCALINGS = dict(
    linear=(("factor",), ()),
    llama3=(("factor", "low_freq_factor", "high_freq_factor"), ("original_max_position_embeddings",)),
    yarn=(("factor",), ("original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
                        "mscale_all_dim")),
)  # fmt: skip
MAX_SCALING = 2**31
MOST = dict(vocab_size=MAX_VOCAB_SIZE, num_hidden_layers=MAX_LAYERS)


@dataclass(frozen=True, kw_only=True)
class DecoderModelConfig:
    """The defaults are those of the published models, not those of transformers' configurations."""

    hidden_size: int  # width of the residual stream
    intermediate_size: int  # width inside the feed-forward
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int = 0  # heads of keys and values; 0: num_attention_heads
    head_dim: int = 0  # width of one head; 0: hidden_size / num_attention_heads
    vocab_size: int = 0  # rows of the embedding; 0: the tokenizer's
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6  # base of the rotary positions' wavelengths
    rope_scaling: tuple = ()  # (name, value) pairs of config.json's rope_parameters beside rope_theta; (): not scaled
    initializer_range: float = 0.02  # standard deviation of random weights
    max_position_embeddings: int = 32_768  # tokens; only exported, because rotary positions have no table
    tie_word_embeddings: bool = False  # the embedding is the output projection too
    # qwen2 (biases on q, k and v; Qwen1.5 too), qwen3 (a norm on each head of q and k), llama (neither)
    model_type: str = "qwen2"

    def __post_init__(self):
        object.__setattr__(self, "rope_scaling", _rope_scaling(self.rope_scaling))
        bad = [f"{f.name}={getattr(self, f.name)!r:.80}" for f in fields(self) if not self._is_valid(f)]
        if bad:
            raise ValueError(
                f"the model's values must be whole numbers (rms_norm_eps and initializer_range fractions, rope_theta a "
                f"number), above 0 and at most {MAX_WIDTH:,} (layers {MAX_LAYERS}), model_type one of "
                f"{', '.join(DECODER_TYPES)}, not {', '.join(bad)}"
            )
        heads = self.num_attention_heads
        object.__setattr__(self, "num_key_value_heads", self.num_key_value_heads or heads)
        if heads % self.num_key_value_heads:
            raise ValueError(f"num_key_value_heads={self.num_key_value_heads} must divide num_attention_heads={heads}")
        if not self.head_dim and self.hidden_size % heads:
            raise ValueError(
                f"num_attention_heads={heads} must divide hidden_size={self.hidden_size}, or give head_dim"
            )
        object.__setattr__(self, "head_dim", self.head_dim or self.hidden_size // heads)
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even: rotary positions turn pairs of numbers")

    parts = ("all",)  # what `--trainable` may name
    max_tokens = None  # of a sequence: no limit, as rotary positions have no table

    @property
    def width(self):
        """Columns of the output table."""
        return self.hidden_size

    @property
    def num_blocks(self):
        return self.num_hidden_layers

    @property
    def kernel_sizes(self):
        """Sizes that the attention kernels must support: the head width."""
        return (self.head_dim,)

    @property
    def has_biases(self):
        """Whether q, k and v have biases."""
        return self.model_type == "qwen2"

    @property
    def has_head_norms(self):
        """Whether each head of q and k is normed."""
        return self.model_type == "qwen3"

    @property
    def query_width(self):
        """Columns of q."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_width(self):
        """Columns of k, and of v."""
        return self.num_key_value_heads * self.head_dim

    def _is_valid(self, field):
        value = getattr(self, field.name)
        if field.type is bool:
            return isinstance(value, bool)
        if field.type is tuple:
            return True  # checked before
        if field.type is str:
            return value in DECODER_TYPES
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        if field.type is float:
            return 0 < value < (1e12 if field.name == "rope_theta" else 1)
        least = 0 if field.default == 0 else 1
        most = MOST.get(field.name, 2**31 if field.name == "max_position_embeddings" else MAX_WIDTH)
        return isinstance(value, int) and least <= value <= most


def _rope_scaling(given):
    """The pairs of `given`, a dict or pairs, in order; ValueError for a way or a number that is not known."""
    values = dict(given or ())
    kind = values.pop("rope_type", "default")
    if kind == "default" and not values:
        return ()
    if kind not in ROPE_SCALINGS:
        raise ValueError(f"rope_type={kind!r:.80}: only {', '.join(ROPE_SCALINGS)} can be used")
    needed, optional = ROPE_SCALINGS[kind]
    truncate = values.pop("truncate", True)
    bad = [name for name, x in values.items() if type(x) not in (int, float) or not 0 < x < MAX_SCALING]
    if bad or set(needed) - values.keys() or values.keys() - {*needed, *optional} or truncate is not True:
        raise ValueError(
            f"rope_type={kind} has {values!r:.200}: it needs {', '.join(needed)}, and may have "
            f"{', '.join(optional) or 'nothing else'}, numbers above 0 and below {MAX_SCALING:,}"
        )
    return tuple(sorted(values.items())) + (("rope_type", kind),)
