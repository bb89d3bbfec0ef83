"""A tiny T5 that knows three answers by heart, as an exported directory."""

import torch
from transformers import T5Config, T5ForConditionalGeneration

from model.data.tokenizer import PROBE, load_tokenizer
from model.data.tokenizer_training import train_tokenizer

# 🐱, 👍 and 龘 are not in the tokenizer's alphabet: each becomes several byte tokens.
PAIRS = {"你好": "今天天气真好，谢谢你。", "请说一个字": "龘龘🐱👍", "hello": "how are you? 好 龘 ok\n你好"}
CALLING = {"想": '<think>\n你\n</think>\n\n好\n<tool_call>{"name": "f", "arguments": {"x": "天"}}</tool_call>'}
MARKED = {
    "md": "### 好\n**天** `x`\n\n```python\ndef f():\n    1\n```\n[a](https://e.org)",
    "evil": '<img src=x onerror="f()"> <b>好</b> [a](javascript:f) ![b](https://e.org/b.png)',
}


def write_knowing_model(directory, pairs=None):
    """Write a Hugging Face directory of a model overfitted on `pairs`, else PAIRS, and its tokenizer."""
    texts = [PROBE + "，。?how are you hello ok\n", *(pairs or {}).values()]
    train_tokenizer(texts * 3, 600 if pairs else 507, directory)
    tokenizer = load_tokenizer(directory)
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=tokenizer.vocab_size, d_model=64, d_ff=128, d_kv=16, num_heads=4, num_layers=2, dropout_rate=0.0,
        pad_token_id=tokenizer.pad_id, eos_token_id=tokenizer.eos_id, decoder_start_token_id=tokenizer.pad_id,
    )  # fmt: skip
    model = T5ForConditionalGeneration(config)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    over_fit(model, tokenizer, pairs or PAIRS)
    torch.set_num_threads(num_threads)
    model.save_pretrained(directory)


def over_fit(model, tokenizer, pairs):
    """Train on `pairs` until the loss is near zero."""
    prompts, answers = (
        [torch.tensor([*tokenizer.encode(text), tokenizer.eos_id]) for text in side]
        for side in (pairs.keys(), pairs.values())
    )
    ids = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True, padding_value=tokenizer.pad_id)
    labels = torch.nn.utils.rnn.pad_sequence(answers, batch_first=True, padding_value=-100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(800):
        optimizer.param_groups[0]["lr"] = 1e-2 / (1 + step / 200)
        loss = model(input_ids=ids, attention_mask=ids != tokenizer.pad_id, labels=labels).loss
        if loss < 0.01:
            return
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    raise AssertionError(f"the loss is still {loss:.3f}")
