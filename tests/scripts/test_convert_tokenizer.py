"""A SentencePiece tokenizer as T5s ship it: converted once, and then trained on with an embedding larger than it."""

import json
import random

import pytest
import sentencepiece
import torch
from transformers import AutoTokenizer

from model.data.tokenizer import PROBE, load_tokenizer
from model.formats.weights import load_weights
from scripts.convert_tokenizer import main as convert
from tests.parts import SHAPE, make_model
from tests.tiny import SHORT, refused, train

OWN_MODEL = SHORT | dict(model=None)


@pytest.fixture(scope="module")
def downloaded(home):
    """A directory as Mengzi-T5's: config.json, pytorch_model.bin with the names of older files, and spiece.model."""
    folder, draw = home / "downloaded", random.Random(0)
    folder.mkdir()
    texts = ["".join(draw.choices(PROBE, k=20)) for _ in range(2000)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_prefix=str(folder / "spiece"), vocab_size=300, character_coverage=1.0,
        pad_id=0, eos_id=1, unk_id=2, bos_id=-1, minloglevel=2,
    )  # fmt: skip
    (folder / "spiece.vocab").unlink()
    shape = SHAPE | dict(feed_forward_proj="gated-gelu", tie_word_embeddings=False, scale_decoder_outputs=False)
    model = make_model(512, shape=shape)
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tensors |= {f"{side}.embed_tokens.weight": tensors["shared.weight"] for side in ("encoder", "decoder")}
    # older versions of transformers wrote a bias that nothing reads
    tensors["decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"] = torch.zeros(32, 2)
    torch.save(tensors, folder / "pytorch_model.bin")
    config = dict(model_type="t5", vocab_size=512, tie_word_embeddings=False, pad_token_id=0, eos_token_id=1,
                  decoder_start_token_id=0, layer_norm_epsilon=1e-6, relative_attention_num_buckets=32)  # fmt: skip
    sizes = {name: SHAPE[name] for name in SHAPE}
    (folder / "config.json").write_text(json.dumps(config | sizes | dict(feed_forward_proj="gated-gelu")))
    return folder


def test_a_sentencepiece_tokenizer_is_asked_to_be_converted_and_then_gives_its_own_ids(downloaded, home, capsys):
    done = train(home, output_dir="sp", finetune_from_ckp_file="downloaded", **OWN_MODEL)
    assert refused(done, "python scripts/convert_tokenizer.py downloaded")
    assert convert([str(downloaded)]) == 0 and "400 tokens" in capsys.readouterr().out
    assert convert([str(downloaded)]) == 2
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(downloaded / "spiece.model"))
    ours = load_tokenizer(downloaded)
    assert (ours.pad_id, ours.eos_id) == (0, 1)
    for text in ("今天天气真好", "请问 这个问题"):
        assert ours.encode(text) == theirs.encode(text)


def test_a_model_whose_embedding_is_larger_than_its_tokenizer_is_trained_and_keeps_it(downloaded, home):
    if not (downloaded / "tokenizer.json").exists():
        assert convert([str(downloaded)]) == 0
    done = train(home, output_dir="larger", finetune_from_ckp_file="downloaded", **OWN_MODEL)
    assert done.codes == [0], done.text
    assert load_weights(home / "larger" / "best").model_config.vocab_size == 512
    adapter = dict(finetune_from_ckp_file="downloaded", lora_rank=2)
    assert train(home, output_dir="larger_lora", **adapter, **OWN_MODEL).codes == [0]


def train_sentencepiece(folder, **options):
    """A SentencePiece model in `folder`, which falls back to bytes."""
    draw = random.Random(0)
    texts = ["".join(draw.choices(PROBE + "abcde ", k=20)) for _ in range(1000)]
    settings = dict(vocab_size=520, byte_fallback=True, pad_id=0, eos_id=1, unk_id=2, bos_id=-1) | options
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_prefix=str(folder / "spiece"), character_coverage=1.0, minloglevel=2,
        **settings,
    )  # fmt: skip
    (folder / "spiece.vocab").unlink()
    named = dict(eos_token="</s>", pad_token="<pad>", unk_token="<unk>", tokenizer_class="T5Tokenizer", extra_ids=100)
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "spiece.model"))


@pytest.mark.parametrize("rule", ["nmt_nfkc", "nmt_nfkc_cf", "identity"])
def test_characters_outside_the_vocabulary_keep_their_bytes_as_transformers_reads_them_too(tmp_path, capsys, rule):
    theirs = train_sentencepiece(tmp_path, normalization_rule_name=rule)
    assert convert([str(tmp_path)]) == 0, capsys.readouterr().err
    ours, stock = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    text = "😀 é cafe\u0301 龘 か\u3099 👨\u200d👩 a\x85b\n\n  c\n "
    assert ours.encode(text) == theirs.encode(text) == stock(text, add_special_tokens=False).input_ids
    assert ours.decode(ours.encode("😀 é龘")) == "😀 é龘"
    assert ours.encode("a</s>b<0x41><extra_id_0>") == theirs.encode("a</s>b<0x41><extra_id_0>")
    assert ours.backend.token_to_id("<extra_id_0>") >= 520


@pytest.mark.parametrize("options", [dict(model_type="bpe"), dict(add_dummy_prefix=False)])
def test_a_tokenizer_that_would_give_other_ids_is_refused_and_leaves_nothing(tmp_path, capsys, options):
    train_sentencepiece(tmp_path, **options)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert convert([str(tmp_path)]) == 2
    assert "nothing was written" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_tokenizer_that_no_run_would_load_leaves_nothing(tmp_path, capsys):
    train_sentencepiece(tmp_path, byte_fallback=False, vocab_size=160)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert convert([str(tmp_path)]) == 2 and "at least 300" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_directory_without_a_tokenizer_is_refused(tmp_path, capsys):
    assert convert([str(tmp_path)]) == 2 and "no SentencePiece model" in capsys.readouterr().err
