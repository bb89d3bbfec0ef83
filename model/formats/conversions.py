"""Writes a Hugging Face directory again in another form: bf16 weights, CTranslate2's files for CPUs, or GGUF."""

import re
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from model.data.tokenizer import copy_tokenizer, load_tokenizer
from model.data.turn_template import turn_template
from model.formats.carried import EOS, GENERATION_FILE, with_both_names, write_json
from model.formats.gguf_file import write_gguf
from model.formats.gguf_vocabulary import GgufVocabulary
from model.formats.model_card import CARD_FILE, ctranslate2_card, gguf_card, model_name, read_card
from model.formats.ollama import modelfile
from model.formats.tensor_files import read_tensors
from model.formats.weights import INDEX, WEIGHTS, check_fits, load_weights, model_directory, read_config, weights_file
from model.nn.decoder.huggingface import rotary_values
from model.nn.decoder.network import DecoderModel
from model.nn.decoder.sizes import DecoderModelConfig
from model.runtime.atomic_io import whole_directory
from model.runtime.json_stream import read_object

MODELFILE = "Modelfile"  # of Ollama


def to_bf16(source: str | Path, target: str | Path) -> None:
    """Write the model in `source`, a Hugging Face or run directory, to `target` with bf16 weights: half the bytes.

    Raises ValueError if there is no model that a family computes.
    """
    source, model_config, values = _model_in(source)
    with whole_directory(target) as draft:
        copy_tokenizer(source, draft)
        _halve_weights(source, draft)
        values = with_both_names(
            values, rotary_values(model_config) if isinstance(model_config, DecoderModelConfig) else {}
        )
        write_json(draft / "config.json", values | dict(dtype="bfloat16", torch_dtype="bfloat16"))
        if (source / GENERATION_FILE).is_file():
            write_json(draft / GENERATION_FILE, read_object(source / GENERATION_FILE))
        if card := read_card(source):
            (draft / CARD_FILE).write_text(card, encoding="utf-8")


def to_ctranslate2(source: str | Path, target: str | Path, quantization: str = "int8") -> None:
    """Write the model in `source`, a Hugging Face or run directory, to `target` for CTranslate2, with its tokenizer.

    Raises ValueError if there is no model that a family computes, or one that CTranslate2 does not, and RuntimeError if
    CTranslate2 is not installed.
    """
    source, model_config, values = _model_in(source)
    converter = _converter(source, getattr(model_config, "scale_decoder_outputs", None))
    with whole_directory(target) as draft:
        try:
            converter.convert(str(draft), quantization=quantization, force=True)
        except (KeyError, ValueError) as error:  # an activation, or a type of model
            refusal = f"{source}: CTranslate2 cannot convert this model ({error}): export it --to bf16"
            raise ValueError(refusal) from None
        copy_tokenizer(source, draft)
        text = read_card(source) or f"# {source.name}\n"
        settings = source / GENERATION_FILE  # CTranslate2 reads no such file, so the card says it
        size = (read_object(settings) if settings.is_file() else {}).get("no_repeat_ngram_size")
        size = size if type(size) is int else 0
        card = ctranslate2_card(text, quantization, bool(values.get("is_encoder_decoder")), size)
        (draft / CARD_FILE).write_text(card, encoding="utf-8")


def to_gguf(source: str | Path, target: str | Path, kind: str = "f16") -> None:
    """Write the decoder in `source`, a Hugging Face or run directory, to `target` for llama.cpp, with a Modelfile.

    `kind` is the type of the weights. Raises ValueError if there is no decoder, or one that llama.cpp would answer
    otherwise with, and RuntimeError if the package gguf is not installed.
    """
    source, model_config, values = _model_in(source)
    if not isinstance(model_config, DecoderModelConfig):
        raise ValueError(f"{source} is a {values['model_type']}: llama.cpp's programs run no encoder: --to ctranslate2")
    tokenizer, weights = load_tokenizer(source), load_weights(source)
    with torch.device("meta"):  # takes no memory
        check_fits(DecoderModel(weights.model_config), weights, source)
    template = turn_template(tokenizer)
    settings = read_object(source / GENERATION_FILE) if (source / GENERATION_FILE).is_file() else {}
    ends = _ends_of_answers(template, settings)
    name = model_name(source)
    file_name = re.sub(r"[^\w.-]+", "-", f"{name}-{kind}.gguf")
    vocabulary = GgufVocabulary(tokenizer, weights.model_config.vocab_size)
    with whole_directory(target) as draft:
        write_gguf(draft / file_name, weights, vocabulary, dict(template=template.text, ends=ends), kind, name)
        texts = [tokenizer.backend.id_to_token(number) for number in ends]
        written = modelfile(file_name, template.frames, settings, texts)
        (draft / MODELFILE).write_text(written, encoding="utf-8")
        card = gguf_card(read_card(source) or f"# {name}\n", file_name, settings)
        (draft / CARD_FILE).write_text(card, encoding="utf-8")


def _ends_of_answers(template, settings):
    """Ids that end an answer: the chat template's, then those of a generation_config.json that the tokenizer has."""
    listed = settings.get(EOS)
    others, token_of = listed if isinstance(listed, list) else [listed], template.tokenizer.backend.id_to_token
    ids = range(template.tokenizer.vocab_size)
    known = [number for number in others if type(number) is int and number in ids and token_of(number)]
    return list(dict.fromkeys([template.end_id, *known]))


def _halve_weights(source, target):
    """Write the weights in `source` to `target` in bf16, one file at a time."""
    files = sorted(source.glob("model*.safetensors"))
    for file in files or [weights_file(source)]:
        tensors = _loaded(file) if files else read_tensors(file)
        halved = {name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
        try:
            save_file(halved, target / (file.name if files else WEIGHTS), metadata={"format": "pt"})
        except SafetensorError as error:  # safetensors raises it for a full or failing disk
            raise OSError(f"{target} cannot be written: {error}") from None
    if (source / INDEX).is_file():
        total = sum((target / file.name).stat().st_size for file in files)
        write_json(target / INDEX, read_object(source / INDEX) | dict(metadata=dict(total_size=total)))


def _loaded(file):
    """The tensors of a safetensors file under their own names; raises ValueError for a damaged one."""
    try:
        return load_file(file)
    except SafetensorError as error:
        raise ValueError(f"{file} cannot be read as weights: {error}: copy it again") from None


def _model_in(path):
    """(its directory, model configuration, all fields of its config.json) of the model in `path`."""
    directory = model_directory(Path(path))
    if directory is None:
        raise ValueError(
            f"no model in {path}: name a Hugging Face directory (config.json and {WEIGHTS}) or a run directory "
            "with best/ or last/, for example model_save/sft_fast; an adapter is merged first: scripts/merge_lora.py"
        )
    family, model_config, values = read_config(directory / "config.json")
    family.check_config(values, directory / "config.json")
    return directory, model_config, values


def _converter(source, scale_decoder_outputs):
    """CTranslate2's converter of a model that scales its decoder's output or not; None: it has no such thing."""
    try:
        from ctranslate2.converters import TransformersConverter
    except ImportError:
        raise RuntimeError("CTranslate2 is not installed: pip install -e '.[ctranslate2]'") from None

    class Converter(TransformersConverter):
        def load_model(self, model_class, *args, **kwargs):
            model = super().load_model(model_class, *args, **kwargs)
            if scale_decoder_outputs is not None:  # which the converter takes from this field of the configuration
                model.config.tie_word_embeddings = scale_decoder_outputs
            return model

    return Converter(str(source))
