"""Byte-level BPE as Qwen2 and Qwen3 have it, learnt from texts: their pre-tokenizer, marks and settings.

Engines that read Qwen's tokenizers read it: each text is its UTF-8 bytes in composed form (NFC), so nothing is unknown.
"""

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

# Qwen2's: a word with the sign before it, one digit, signs, line ends, other white space
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PAD, OPENER, CLOSER = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
# Not special in Qwen3's files: decoding shows them.
SHOWN_MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
SETTINGS = dict(
    tokenizer_class="Qwen2Tokenizer", eos_token=CLOSER, pad_token=PAD, bos_token=None, unk_token=None,
    add_bos_token=False, add_prefix_space=False, split_special_tokens=False, clean_up_tokenization_spaces=False,
    errors="replace", model_max_length=32_768, additional_special_tokens=[OPENER, CLOSER],
)  # fmt: skip


# what such a tokenizer has without learning
BYTE_LEVEL_TOKENS = [*pre_tokenizers.ByteLevel.alphabet(), PAD, OPENER, CLOSER, *SHOWN_MARKS]


def learn_byte_level(slices: list[str], vocab_size: int, first: list[str]) -> Tokenizer:
    """A tokenizer of at most `vocab_size` tokens: the 256 bytes, merges of them, and the marks, which come last."""
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(SPLIT_PATTERN), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    marks = [AddedToken(mark, special=True, normalized=False) for mark in (PAD, OPENER, CLOSER)]
    marks += [AddedToken(mark, special=False, normalized=False) for mark in SHOWN_MARKS]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(marks),
        initial_alphabet=[token for token in first if len(token) == 1],
        show_progress=False,
    )
    backend.train_from_iterator(slices, trainer)
    backend.add_tokens(marks)
    return backend
