"""A tiny tokenizer of Qwen's kind: byte-level BPE without unknown characters, with ChatML's special tokens."""

import json

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from model.data.tokenizer import PROBE, load_tokenizer

SPECIAL = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# that of Qwen1.5 and Qwen2
CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_qwen_tokenizer(directory, template=CHATML, end="<|im_end|>", special=SPECIAL, marks=()):
    """The ChatTokenizer in `directory`, written as Qwen's are; without a template if that is None.

    `special` are its special tokens, `end` the one that ends an answer, `marks` tokens such as <think>.
    """
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(__import__("tokenizers").Regex(SPLIT), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator([PROBE, "system user assistant\nYou are a helpful assistant"] * 3, trainer)
    backend.add_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    backend.add_tokens([AddedToken(token, normalized=False) for token in marks])
    directory.mkdir(parents=True, exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    settings = dict(eos_token=end, pad_token=special[0], tokenizer_class="Qwen2Tokenizer", model_max_length=32768)
    if special != SPECIAL:
        settings |= dict(bos_token=special[0], tokenizer_class="PreTrainedTokenizerFast")
    if template is not None:
        settings["chat_template"] = template
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return load_tokenizer(directory)
