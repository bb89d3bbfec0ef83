"""NF4: the codes and numbers of bitsandbytes, and networks whose frozen matrices are held in them."""

import bitsandbytes
import numpy as np
import pytest
import torch
from bitsandbytes import functional

from model.data.sequences import Sequences
from model.formats.weights import LoadedWeights, load_into
from model.nn.base import Packing
from model.nn.decoder.family import DECODER
from model.nn.decoder.sizes import DecoderModelConfig
from model.nn.lora import LoraConfig, attach, draw, is_factor
from model.nn.quantized import GROUP, NUMBER_BYTES, NF4Matrices, make_packed, merge_packed, steps_on
from tests.nn.kernels.test_nf4 import CPU, SHAPES, matrices, written
from tests.nn.test_lora import IDS, adapted, gradients_after
from tests.parts import batch_of, farthest, make_model


def theirs(matrix):
    """bitsandbytes' (codes, state) of a matrix."""
    return functional.quantize_4bit(matrix, blocksize=64, quant_type="nf4", compress_statistics=True)


def test_the_8_bit_numbers_are_those_of_bitsandbytes():
    assert torch.equal(steps_on(CPU), functional.create_dynamic_map())


@pytest.mark.parametrize("shape", SHAPES)
def test_the_codes_are_those_of_bitsandbytes(shape):
    for matrix, ours in zip(matrices(shape), written(matrices(shape)), strict=True):
        codes, state = theirs(matrix)
        assert torch.equal(ours.codes, codes.view(-1))
        assert torch.equal(ours.groups, state.state2.absmax) and torch.equal(ours.offsets[0], state.offset)
        # bitsandbytes' code for CPUs misses the nearest of the 256 values now and then
        other = (ours.scales != state.absmax.view(-1)).nonzero().view(-1)
        assert len(other) <= max(2, 0.01 * len(ours.scales))
        largest = matrix.view(-1, 64).abs().amax(1) - state.offset
        scaled = (largest / ours.groups.repeat_interleave(GROUP)[: len(largest)])[other]
        near, far = (steps_on(CPU)[scales.int()][other] for scales in (ours.scales, state.absmax.view(-1)))
        assert ((near - scaled).abs() <= (far - scaled).abs()).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_numbers_and_products_of_the_same_codes_are_those_of_bitsandbytes(shape, dtype):
    codes, state = theirs(matrices(shape)[0].to(dtype))
    ours = NF4Matrices(shape, codes.view(-1), state.absmax.view(-1), state.state2.absmax, state.offset.view(1))
    numbers = ours.read(dtype, in_kernel=False)
    assert torch.equal(numbers, functional.dequantize_4bit(codes, state))
    x = torch.randn(7, shape[1], generator=torch.Generator().manual_seed(1)).to(dtype)
    product = bitsandbytes.matmul_4bit(x, codes.t(), quant_state=state)
    assert (x @ numbers.T - product).norm() <= (1e-6 if dtype == torch.float32 else 1e-2) * product.norm()


@pytest.mark.parametrize("shape", SHAPES)
def test_adjacent_matrices_are_read_as_one(shape):
    places = written(matrices(shape))
    whole = merge_packed(places).read(torch.float32, in_kernel=False)
    assert torch.equal(whole, torch.cat([place.read(torch.float32, in_kernel=False) for place in places]))
    error = (whole - torch.cat(matrices(shape))).norm() / torch.cat(matrices(shape)).norm()
    assert 0.08 < error < 0.11


def test_a_matrix_that_does_not_fill_blocks_is_refused():
    with pytest.raises(ValueError, match="blocks of 64"):
        make_packed([torch.Size((3, 5))], CPU)


def test_the_gradients_of_an_adapter_on_packed_matrices_are_those_on_their_numbers(store, tokenizer):
    packed = adapted(make_model(tokenizer.vocab_size), base_precision="nf4")
    plain = make_model(tokenizer.vocab_size)
    with torch.no_grad():
        for p, own in zip(
            plain.parameters(), [p for n, p in packed.named_parameters() if "lora" not in n], strict=True
        ):
            if hasattr(own, "packed"):
                p.copy_(own.packed.read(torch.float32, in_kernel=False))
    batch = batch_of(store, IDS, tokenizer.pad_id)
    ours = gradients_after(packed, batch)
    assert farthest(ours, gradients_after(adapted(plain), batch)) <= 1e-6


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_a_network_placed_without_memory_reads_its_matrices_into_four_bits(model_type):
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=300)
    config, gradients = DecoderModelConfig(**sizes, num_key_value_heads=2, model_type=model_type), []
    tensors = DECODER.build(config).initialise(0).state_dict()
    for base_precision in ("nf4", "auto"):
        lora = LoraConfig(rank=4, alpha=8, targets=DECODER.adapter_targets(config), base_precision=base_precision)
        with torch.device("meta"):
            model = attach(DECODER.build(config), lora)
        load_into(draw(model.place("cpu"), 1), LoadedWeights(tensors, config, None), "base")
        for name, p in model.named_parameters():
            if hasattr(p, "packed"):
                tensors[name] = p.packed.read(torch.float32, in_kernel=False)
            elif is_factor(name, "lora_B"):
                p.data.fill_(0.01)
        lengths = np.array([[3, 5], [9, 2]])
        sequences = Sequences(tuple(np.arange(column.sum()) + 5 for column in lengths.T), lengths)
        gradients.append(gradients_after(model, DECODER.collate(sequences, Packing(0))))
    assert farthest(*gradients) <= 1e-6 and len(gradients[0]) == 2 * 2 * 7


def test_packed_matrices_take_four_bits_a_number_and_no_other_memory(tokenizer):
    model = adapted(make_model(tokenizer.vocab_size), base_precision="nf4")
    numbers = [p.numel() for p in model.parameters() if hasattr(p, "packed")]
    assert sum(p.untyped_storage().nbytes() for p in model.parameters() if hasattr(p, "packed")) == 4 * len(numbers)
    held = sum(flat.nbytes for flat in model.flat.frozen[2:])
    assert held == pytest.approx(sum(numbers) * NUMBER_BYTES + 8 * len(numbers), rel=0.01)
