"""The README.md of an exported model: what it is, data, steps, scores, how to use it."""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

CARD_FILE = "README.md"


@dataclass(frozen=True)
class CardFacts:
    """Plain values that a run knows of its exported model."""

    title: str = "Chat model"
    summary: str = ""  # a sentence
    tables: dict = field(default_factory=dict)  # {heading: {name of a row: value}}
    file: str = ""  # that the scores were measured on
    scores: dict = field(default_factory=dict)  # {metric: number}
    optimizer: str = ""  # that trained all of the weights last; "": unknown
    base: str = ""  # name on a hub of the model that was trained on; "": none, or unknown


def model_card(facts: CardFacts, model_type: str, is_encoder_decoder: bool) -> str:
    """Text of a model card with Hugging Face's metadata in its head."""
    head = _metadata(facts, model_type, "transformers", is_encoder_decoder)
    return _card(facts, head, _USE.format(**_calls(is_encoder_decoder)))


def adapter_card(facts: CardFacts, model_type: str, is_encoder_decoder: bool, base: str) -> str:
    """Text of the card of an adapter in PEFT's format; `base` is the directory of the model that it was trained on."""
    use = _USE_ADAPTER.format(**_calls(is_encoder_decoder), base=_quoted(base))
    return _card(facts, _metadata(facts, model_type, "peft", is_encoder_decoder), use)


def merged_card(card: str, is_encoder_decoder: bool) -> str:
    """The text of an adapter's card with the use of a model in place of the adapter's, which is merged."""
    return _with_use(card, "transformers", _USE.format(**_calls(is_encoder_decoder)), _LIMITS)


def with_base(card: str, name: str) -> str:
    """A card whose head says that its model was trained from the one of this name on a hub."""
    has_head = card.startswith("---\n") and "\n---\n" in card
    head, rest = card.split("\n---\n", 1) if has_head else ("---", f"\n{card}")
    others = re.sub(r"\nbase_model:.*(\n[ -].*)*", "", head)  # a name, or a list of them
    return f"{others}\nbase_model: {_quoted(name)}\n---\n{rest}"


def with_named_base(card: str, directory: str, name: str) -> str:
    """An adapter's card with the base's name on a hub in place of the directory that it was trained on."""
    return with_base(card, name).replace(_quoted(directory), _quoted(name))


def read_card(directory) -> str:
    """Text of its model card; empty without one. A link is not followed: it may lead to what is not to be published."""
    card = Path(directory, CARD_FILE)
    return card.read_text(encoding="utf-8", errors="replace") if card.is_file() and not card.is_symlink() else ""


def hub_name(directory) -> str:
    """The name that the model in a directory has on the Hub where Hugging Face's cache tells, else ""."""
    cached = [part for part in Path(directory).parts if part.startswith("models--")]
    return cached[-1].removeprefix("models--").replace("--", "/") if cached else ""


def model_name(directory) -> str:
    """`hub_name`, or else the directory's name."""
    if name := hub_name(directory):
        return name
    parts = Path(directory).parts
    return parts[-2] if parts[-1] in ("best", "last") and len(parts) > 1 else parts[-1]


def optimizer_of_card(card: str) -> str:
    """The optimizer that the card of a run's model names; "" for other cards, an adapter's among them."""
    found = re.search(r"^\| optimizer \| (\w+), peak learning rate ", card, re.MULTILINE)
    return found[1] if found and "\n| trained | LoRA" not in card else ""


def _calls(is_encoder_decoder):
    """What a page with transformers' calls is filled with."""
    auto_class, answer = _READ[is_encoder_decoder]
    or_gguf = "" if is_encoder_decoder else ", `--to gguf` writes it for llama.cpp and Ollama"
    return dict(auto_class=auto_class, ask=_ASK.format(answer=answer), or_gguf=or_gguf)


def _card(facts, head, use):
    parts = [head, f"# {facts.title}", facts.summary or "Trained with Chat trainer."]
    for heading, rows in (facts.tables | {"Scores": _score_rows(facts)}).items():
        if rows:
            parts.append(f"## {heading}\n\n{_table(rows)}")
    return "\n\n".join([*parts, use, _LIMITS]) + "\n"


def ctranslate2_card(card: str, quantization: str, is_encoder_decoder: bool, no_repeat_ngram_size: int = 0) -> str:
    """The text of a model card with the use of the model's form for CTranslate2 in place of that with transformers."""
    use = _USE_TRANSLATOR if is_encoder_decoder else _USE_GENERATOR
    use = use.format(quantization=quantization, no_repeat_ngram_size=no_repeat_ngram_size)
    return _with_use(card, "ctranslate2", use)


def gguf_card(card: str, file_name: str, settings: dict) -> str:
    """The text of a model card with the use of its GGUF file; `settings` are those of generation_config.json."""
    size = settings.get("no_repeat_ngram_size")
    unsaid = f"\n\nllama.cpp has nothing for no_repeat_ngram_size={size} of generation_config.json." if size else ""
    return _with_use(card, "gguf", _USE_GGUF.format(file_name=file_name) + unsaid)


def _with_use(card, library, *ends):
    """A card for another library, with `ends` in place of its use, and of what these say too."""
    titles = "|".join(re.escape(end.partition("\n")[0]) for end in ends)
    others = re.sub(rf"^(?:{titles})\n.*?(?=^## |\Z)", "", card, flags=re.DOTALL | re.MULTILINE)
    others = re.sub("^library_name: .*", f"library_name: {library}", others, count=1, flags=re.MULTILINE)
    return "\n\n".join([others.rstrip(), *ends]) + "\n"


def _metadata(facts, model_type, library, is_encoder_decoder):
    """YAML between lines of dashes. Strings are written as JSON, which is YAML too."""
    task = "text2text-generation" if is_encoder_decoder else "text-generation"
    lines = [f"library_name: {library}", f"pipeline_tag: {task}", "tags:", f"- {_quoted(model_type)}"]
    lines += [f"base_model: {_quoted(facts.base)}"] if facts.base else []
    if facts.scores:
        lines += [
            "model-index:", f"- name: {_quoted(facts.title)}", "  results:", "  - task:", f"      type: {task}",
            "    dataset:", "      type: custom", f"      name: {_quoted(facts.file)}", "    metrics:",
        ]  # fmt: skip
        for name, value in facts.scores.items():
            lines += [f"    - type: {_quoted(name)}", f"      value: {_number(value, 6)}"]
    return "\n".join(["---", *lines, "---"])


def _number(value, digits):
    """A score with so many digits; what rounding alone left over is 0."""
    return f"{round(value, 6):.{digits}g}"


def _quoted(text):
    return json.dumps(text, ensure_ascii=False)


def _score_rows(facts):
    """{label: value} of the scores, after the file that they were measured on."""
    scores = {_LABELS.get(name, name): _number(value, 4) for name, value in facts.scores.items()}
    return {"measured on": facts.file} | scores if scores else {}


def _rounded(name, value, digits=4):
    """A score as text: BLEU and chrF, which run from 0 to 100, with two places, others with so many digits."""
    return f"{value:.2f}" if name in ("bleu", "chrf") else f"{value:.{digits}g}"


def _table(rows):
    cells = [(name, str(value).replace("|", "\\|").replace("\n", " ")) for name, value in rows.items()]
    return "\n".join(["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in cells)])


_LABELS = {
    "loss": "loss, nats a target token", "nats_per_char": "loss, nats a character", "bleu": "BLEU, 0 to 100",
    "chrf": "chrF, 0 to 100", "loops": "greedy answers that repeat themselves, share",
    "ended": "greedy answers that end by themselves, share", "length_ratio": "length of answers to references'",
    "distinct_2": "distinct-2", "accuracy": "chosen response preferred, share of pairs",
    "margin": "reward of the chosen response less that of the rejected one",
    "chosen_reward": "reward of the chosen response", "rejected_reward": "reward of the rejected response",
    "chosen_log_prob": "log-probability of the chosen response, nats a token",
    "rejected_log_prob": "log-probability of the rejected response, nats a token",
    "chosen_log_ratio": "the same less the reference's, of the chosen response",
    "rejected_log_ratio": "the same less the reference's, of the rejected response",
}  # fmt: skip
_READ = {  # {is_encoder_decoder: (transformers' class, what is the answer)}
    True: ("AutoModelForSeq2SeqLM", "output[0]"),
    False: ("AutoModelForCausalLM", 'output[0, inputs["input_ids"].shape[1] :]'),
}
_ASK = """\
messages = [{{"role": "user", "content": "你好"}}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
output = model.generate(**inputs, max_new_tokens=64)
print(tokenizer.decode({answer}, skip_special_tokens=True))
```
"""
_USE = """\
## Use

From Python:

```python
from transformers import AutoTokenizer, {auto_class}

directory = "."  # this file's directory
tokenizer = AutoTokenizer.from_pretrained(directory)
model = {auto_class}.from_pretrained(directory)
{ask}
With Chat trainer: `python scripts/chat.py DIRECTORY` talks to it in a terminal, `python scripts/serve.py DIRECTORY`
serves it, `python scripts/export.py DIRECTORY --to ctranslate2` makes it fast on CPUs{or_gguf}."""
_USE_ADAPTER = """\
## Use

From Python, with the model that it was trained on:

```python
from peft import PeftModel
from transformers import AutoTokenizer, {auto_class}

directory = "."  # this file's directory
base = {base}
tokenizer = AutoTokenizer.from_pretrained(directory)
model = PeftModel.from_pretrained({auto_class}.from_pretrained(base), directory)
{ask}
With Chat trainer: `python scripts/chat.py DIRECTORY` talks to it in a terminal, `python scripts/merge_lora.py DIRECTORY
MERGED` writes a model without an adapter."""
_USE_TRANSLATOR = """\
## Use

Weights in {quantization}, for CTranslate2:

```python
import ctranslate2
from transformers import AutoTokenizer

directory = "."  # this file's directory
tokenizer = AutoTokenizer.from_pretrained(directory)
model = ctranslate2.Translator(directory, device="cpu")
ids = tokenizer.apply_chat_template([{{"role": "user", "content": "你好"}}], return_dict=False)
tokens = tokenizer.convert_ids_to_tokens(ids)
settings = dict(no_repeat_ngram_size={no_repeat_ngram_size}, max_decoding_length=64)
result = model.translate_batch([tokens], beam_size=1, **settings)
print(tokenizer.decode(tokenizer.convert_tokens_to_ids(result[0].hypotheses[0]), skip_special_tokens=True))
```"""
_USE_GENERATOR = """\
## Use

Weights in {quantization}, for CTranslate2:

```python
import ctranslate2
from transformers import AutoTokenizer

directory = "."  # this file's directory
tokenizer = AutoTokenizer.from_pretrained(directory)
model = ctranslate2.Generator(directory, device="cpu")
messages = [{{"role": "user", "content": "你好"}}]
ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
tokens = tokenizer.convert_ids_to_tokens(ids)
settings = dict(no_repeat_ngram_size={no_repeat_ngram_size}, max_length=64)
result = model.generate_batch([tokens], sampling_topk=1, include_prompt_in_result=False, **settings)
print(tokenizer.decode(result[0].sequences_ids[0], skip_special_tokens=True))
```"""
_USE_GGUF = """\
## Use

With llama.cpp, whose server has a page and OpenAI's HTTP interface, and with Ollama:

```bash
llama-server -m {file_name} --jinja
llama-cli -m {file_name} --jinja
ollama create my-model -f Modelfile && ollama run my-model
```

From Python (`pip install llama-cpp-python`):

```python
from llama_cpp import Llama

model = Llama("{file_name}", n_ctx=2048, verbose=False)
messages = [{{"role": "user", "content": "你好"}}]
result = model.create_chat_completion(messages, temperature=0, repeat_penalty=1, max_tokens=64)
print(result["choices"][0]["message"]["content"])
```

llama.cpp does not compose characters: give it text in NFC, as almost all text is."""
_LIMITS = """\
## Limits

A small model says wrong things in good language: check what it says before anyone relies on it. It may be published
under what the licences of its data allow."""
