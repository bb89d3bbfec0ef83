"""T5ModelConfig: sizes and variant of a T5, under the names of transformers' configurations."""

from dataclasses import dataclass, fields

from config import MAX_LAYERS, MAX_VOCAB_SIZE, MAX_WIDTH

T5_TYPES = ("t5", "mt5", "umt5")
T5_ACTIVATIONS = ("relu", "gelu", "silu", "gated-relu", "gated-gelu", "gated-silu")


@dataclass(frozen=True, kw_only=True)
class T5ModelConfig:
    """Sizes and variant of a T5. The defaults are v1.0's; v1.1, Flan and mT5 have feed_forward_proj="gated-gelu",
    tie_word_embeddings=False and scale_decoder_outputs=False.
    """

    d_model: int  # width of the residual stream
    d_ff: int  # width inside the feed-forward
    num_heads: int
    d_kv: int  # width of one head
    num_layers: int  # encoder blocks
    num_decoder_layers: int
    vocab_size: int = 0  # 0: the tokenizer's
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128  # tokens
    layer_norm_epsilon: float = 1e-6
    model_type: str = "t5"  # t5, mt5 (never scales the decoder's output), umt5 (a position bias in every layer)
    feed_forward_proj: str = "relu"  # relu, gelu or silu; gated-relu, gated-gelu, gated-silu
    tie_word_embeddings: bool = True  # the embedding is the output projection too
    scale_decoder_outputs: bool = True  # by d_model ** -0.5
    decoder_start_token_id: int | None = None  # that a response begins with; None: the tokenizer's pad token

    def __post_init__(self):
        bad = [f"{f.name}={getattr(self, f.name)!r:.80}" for f in fields(self) if not self._is_valid(f)]
        if bad:
            raise ValueError(
                f"the model's values must be whole numbers (layer_norm_epsilon a fraction), above 0 and at most "
                f"{MAX_WIDTH:,} (layers {MAX_LAYERS}, vocab_size {MAX_VOCAB_SIZE:,}), model_type one of "
                f"{', '.join(T5_TYPES)}, feed_forward_proj one of {', '.join(T5_ACTIVATIONS)}, not {', '.join(bad)}"
            )
        if (self.model_type, self.scale_decoder_outputs) in (("mt5", True), ("umt5", False)):
            raise ValueError(
                f"model_type={self.model_type} with scale_decoder_outputs={self.scale_decoder_outputs}: transformers "
                "never scales mt5's outputs and always umt5's"
            )
        buckets, distance = self.relative_attention_num_buckets, self.relative_attention_max_distance
        if buckets < 4 or buckets % 2 or distance <= buckets // 2:
            raise ValueError(
                f"relative_attention_num_buckets={buckets} must be even and at least 4, and "
                f"relative_attention_max_distance={distance} must be more than half of it"
            )

    parts = ("all", "decoder")  # what `--trainable` may name
    max_tokens = None  # of a sequence: no limit

    @property
    def width(self):
        """Columns of the output table."""
        return self.d_model

    @property
    def num_blocks(self):
        """Blocks of both stacks."""
        return self.num_layers + self.num_decoder_layers

    @property
    def kernel_sizes(self):
        """Sizes that the attention kernels must support: head width, buckets of the position bias."""
        return self.d_kv, self.relative_attention_num_buckets

    @property
    def is_gated(self):
        return self.feed_forward_proj.startswith("gated-")

    def _is_valid(self, field):
        value, least = getattr(self, field.name), dict(vocab_size=0, decoder_start_token_id=0).get(field.name, 1)
        if value is None:
            return field.default is None
        if field.type in (float, bool):
            return isinstance(value, field.type) and (field.type is bool or 0 < value < 1)
        if field.type is str:
            return value in dict(model_type=T5_TYPES, feed_forward_proj=T5_ACTIVATIONS)[field.name]
        most = dict(vocab_size=MAX_VOCAB_SIZE, decoder_start_token_id=MAX_VOCAB_SIZE).get(field.name, MAX_WIDTH)
        most = MAX_LAYERS if "layers" in field.name else most
        return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
