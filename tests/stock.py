"""transformers' model with the weights of one of ours: the reference of tests and measurements."""

import tempfile
from pathlib import Path

from model.nn.weights_io import write_model


def as_hugging_face(model, tokenizer, **options):
    """transformers' model with the weights of `model`, read with `options` from files that `model` is written to."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM  # takes seconds to import

    with tempfile.TemporaryDirectory() as folder:
        write_model(model, tokenizer, Path(folder))
        kind = AutoModelForSeq2SeqLM if hasattr(model, "encoder") else AutoModelForCausalLM
        return kind.from_pretrained(folder, **options)
