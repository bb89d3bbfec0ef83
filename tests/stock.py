"""transformers' model with the weights of one of ours: the reference of tests and measurements."""

import tempfile
from pathlib import Path

from model.formats.weights import write_model


def as_hugging_face(model, tokenizer):
    """transformers' model with the weights of `model`, read from files that `model` is written to."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM  # takes seconds to import

    with tempfile.TemporaryDirectory() as folder:
        write_model(model, tokenizer, Path(folder))
        kind = AutoModelForSeq2SeqLM if hasattr(model, "encoder") else AutoModelForCausalLM
        return kind.from_pretrained(folder, **attention_of(model))


class AfterPrompt:
    """One of transformers' processors of logits, that is shown generated ids alone; theirs see the prompt too."""

    def __init__(self, processor, prompt_tokens):
        self.processor, self.prompt_tokens = processor, prompt_tokens

    def __call__(self, ids, scores):
        return self.processor(ids[:, self.prompt_tokens :], scores)


def guards_of(penalties, prompt_tokens):
    """transformers' processors that stand for the dict `penalties`, shown what follows so many tokens of a prompt."""
    from transformers.generation import logits_process as stock

    kinds = dict(
        repetition_penalty=stock.RepetitionPenaltyLogitsProcessor,
        no_repeat_ngram_size=stock.NoRepeatNGramLogitsProcessor,
    )
    return [AfterPrompt(kinds[name](value), prompt_tokens) for name, value in penalties.items()]


def attention_of(model):
    """Options of from_pretrained. UMT5 gets eager attention: transformers 5.17 leaves out its causal mask in SDPA."""
    return dict(attn_implementation="eager") if getattr(model.config, "model_type", "") == "umt5" else {}
