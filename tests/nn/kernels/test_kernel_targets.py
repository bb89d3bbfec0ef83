"""Every kernel compiles for an RTX 30, without a GPU; with the tests marked gpu also for A100 and RTX 40.

Of the GPUs with compute capability 8 the RTX 30 and 40 have the least shared memory.
"""

from contextlib import contextmanager

import numpy as np
import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget

from model.data.sequences import Sequences
from model.nn import activations, flat_params, layers, loss
from model.nn import dropout as dropout_module
from model.nn.base import Packing
from model.nn.guides import WINDOW
from model.nn.loss_terms import LossTerms
from model.nn.t5.batch import collate
from model.nn.t5.network import TextToTextModel
from model.nn.t5.sizes import T5ModelConfig
from model.nn.t5.warm_up import kernel_works
from model.train import adamw_rms, muon, optim
from tests.nn.kernels import (
    test_adamw,
    test_attention,
    test_decode_attention,
    test_dropout,
    test_gate,
    test_lora,
    test_nf4,
    test_norm,
    test_rotary,
)
from tests.parts import SHAPE, make_config, make_model

SHARED_BYTES = 99 * 1024  # per block on sm_86 and sm_89; sm_80 has 163 KiB


def kernel_names():
    """Names of the kernels that are launched: all Triton functions but their private helpers."""
    from model.nn.kernels import (
        adamw,
        attention,
        cross_entropy,
        decode_attention,
        dropout,
        gate,
        guided_cross_entropy,
        lora,
        muon,
        nf4,
        norm,
        rotary,
        sums,
    )

    modules = (adamw, attention, cross_entropy, decode_attention, dropout, gate, guided_cross_entropy)
    modules += (lora, muon, nf4, norm, rotary, sums)
    functions = {name: f for module in modules for name, f in vars(module).items()}
    return {name for name, f in functions.items() if isinstance(f, triton.JITFunction) and not name.startswith("_")}


class Card:
    """The driver that Triton asks for the target when it compiles."""

    def __init__(self, capability):
        self.capability = capability

    def get_current_target(self):
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self):
        return self.capability

    def get_current_stream(self, device):
        return 0


@contextmanager
def compiling_for(capability, patch):
    """Inside, launches compile for this compute capability and do not run; yields {name: compiled kernels}."""
    kernels, launch = {}, triton.JITFunction.run

    def compile_only(self, *args, grid, warmup, **options):
        kernels.setdefault(self.__name__, []).append(launch(self, *args, grid=grid, warmup=True, **options))

    patch.setattr(triton.JITFunction, "run", compile_only)
    patch.setattr(triton.runtime.driver, "_active", Card(capability))
    yield kernels
    patch.undo()


OTHER_GPUS = [pytest.param(capability, marks=pytest.mark.gpu) for capability in (80, 89)]  # A100; RTX 40


@pytest.mark.parametrize("capability", [86, *OTHER_GPUS])
def test_every_kernel_compiles_for_the_gpu_and_fits_its_shared_memory(capability, monkeypatch):
    with compiling_for(capability, monkeypatch) as kernels:
        attention_cases = [(name, 64) for name in test_attention.CASES]
        attention_cases += [("grouped", 96), ("grouped", 128), *(("decoder", width) for width in (16, 32, 96, 128))]
        for name, head_width in attention_cases:
            test_attention.outcome(*test_attention.CASES[name], 8, head_width, torch.bfloat16, "cpu", 0, kernels=True)
        for width in (512, 768):
            test_norm.norm_errors("cpu", torch.bfloat16, width=width)
            test_dropout.outcomes("cpu", torch.bfloat16, [40, 23], width, kernels=True)
        for head_width in (16, 96, 128):
            for num_rotated in (3, 5):
                test_rotary.rotary_errors("cpu", torch.bfloat16, head_width, num_rotated=num_rotated, has_norm=True)
        test_rotary.rotary_errors("cpu", torch.bfloat16, 128)
        launch_cross_entropy()
        launch_guided_cross_entropy()
        test_nf4.interpreted()
        test_adamw.update_errors("cpu")
        test_gate.gate_errors("cpu", torch.bfloat16, "gelu", width=1024)
        test_lora.adapter_errors("cpu", torch.bfloat16, 500, 768, 768, 3, (0, 1, 2), 64)
        launch_muon()
        for head_width in (16, 32, 64, 96, 128):
            test_decode_attention.errors("cpu", torch.bfloat16, head_width)
    assert kernels.keys() == kernel_names()
    for name, compiled in kernels.items():
        for kernel in compiled:
            assert kernel.asm["cubin"]
            assert kernel.metadata.shared <= SHARED_BYTES, f"{name}: {kernel.metadata.shared:,} bytes"


def test_large_tensors_are_loaded_and_stored_16_bytes_at_a_time(monkeypatch):
    with compiling_for(86, monkeypatch) as kernels:
        launch_cross_entropy()
        launch_muon()
        test_adamw.update_errors("cpu", (4112, 512))
    for name in ("cross_entropy", "matrix_products", "subtract_products", "adamw_rms"):
        for kernel in kernels[name]:
            narrow, wide = (kernel.asm["ptx"].count(f"st.global.{width}") for width in ("b16", "v4.b32"))
            assert wide and not narrow and kernel.asm["ptx"].count("ld.global.b16") <= 1, name


def launch_cross_entropy():
    from model.nn.kernels.cross_entropy import cross_entropy_

    cross_entropy_(torch.zeros(4, 29_312, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.int64), 29_298, 0.0)


def launch_guided_cross_entropy():
    from model.nn.kernels.guided_cross_entropy import guided_cross_entropy_

    logits, labels = torch.zeros(4, 29_312, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.int64)
    teachers, seen = torch.zeros(2, 4, 29_312, dtype=torch.bfloat16), torch.zeros(4, WINDOW, dtype=torch.int64)
    for kind in ("unlikelihood", "scalegrad", "contrastive"):
        guided_cross_entropy_(logits, labels, 29_298, LossTerms(against_loops=kind), (teachers, seen))
    guided_cross_entropy_(logits, labels, 29_298, LossTerms(), (teachers, None))


def test_muons_products_compile_for_an_h100_so_that_two_programs_share_a_multiprocessor(monkeypatch):
    with compiling_for(90, monkeypatch) as kernels:
        launch_muon()
    products = kernels["matrix_products"] + kernels["subtract_products"]
    assert len({kernel.hash for kernel in products}) <= 6, "each takes a second to compile before the first update"
    assert all("wgmma" in kernel.asm["ptx"] and kernel.metadata.shared <= 113 * 1024 for kernel in products)


def launch_muon():
    from model.nn.kernels.muon import Subtraction, nesterov_directions
    from model.train.orthogonal import orthogonalise_

    one = torch.ones(())
    for shape in ((2, 512, 512), (1, 2048, 512), (1, 512, 2048)):
        weights, directions = torch.zeros(shape), torch.zeros(shape, dtype=torch.bfloat16)
        _, norms, factors = nesterov_directions(weights, weights, weights, one, one, (0.95, 0.2, 1e-3))
        orthogonalise_([(directions, norms, Subtraction(weights, factors, one, 0.1))])


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_kernels_are_compiled_once_for_every_number_of_tokens(dropout, monkeypatch):
    for module in (flat_params, layers, loss, dropout_module):
        monkeypatch.setattr(module, "runs_kernels", lambda *_: True)
    sizes = dict(d_model=128, d_ff=256, num_heads=2, d_kv=64, num_layers=1, num_decoder_layers=1, vocab_size=500)
    small = TextToTextModel(T5ModelConfig(**sizes), dropout, torch.bfloat16).initialise(0)
    with compiling_for(86, monkeypatch) as kernels:
        small(packed(8)).backward()
        first = variants(kernels)
        for num_pairs in range(9, 25):
            small(packed(num_pairs)).backward()
        assert variants(kernels) == first
    assert first.keys() >= {"attention_forward", "attention_backward_keys", "cross_entropy"}
    assert ("dropout_forward" in first, "relu_dropout_backward" in first) == (dropout > 0, dropout > 0)
    # with an added tensor and without; with dropout the backward of the two differs too
    assert (len(first["norm_forward"]), len(first["norm_backward"])) == (2, 2 if dropout else 1)


@pytest.mark.parametrize(("dropout", "feed_forward"), [(0.0, "gated-gelu"), (0.1, "relu")])
def test_what_is_launched_ahead_are_the_kernels_of_a_step_and_of_a_decoded_token(dropout, feed_forward, monkeypatch):
    for module in (activations, flat_params, layers, loss, dropout_module):
        monkeypatch.setattr(module, "runs_kernels", lambda *_: True)
    sizes = dict(
        d_model=128,
        d_ff=256,
        num_heads=2,
        d_kv=64,
        num_layers=1,
        num_decoder_layers=1,
        vocab_size=500,
        feed_forward_proj=feed_forward,
    )
    model = TextToTextModel(T5ModelConfig(**sizes), dropout, torch.bfloat16).initialise(0)
    with compiling_for(86, monkeypatch) as kernels, monkeypatch.context() as patch:
        model(packed(8)).backward()
        patch.setattr(TextToTextModel, "uses_kernels", True)
        cache = model.new_cache(3, 16, 16)
        model.decode_one(torch.zeros(3, dtype=torch.int64), cache)
        needed = {name: set(hashes) for name, hashes in variants(kernels).items()}
        kernels.clear()
        for work in kernel_works(model.config, "cpu", dropout):
            work()
        ahead = variants(kernels)
    missing = {name: hashes - ahead.get(name, set()) for name, hashes in needed.items()}
    assert not any(missing.values()), missing
    assert needed.keys() >= {"attention_backward_keys", "decode_attention", "norm_forward", "cross_entropy"}


@pytest.mark.parametrize("optimizer", ["muon", "adamw_rms"])
def test_what_is_launched_ahead_are_the_kernels_of_an_update(optimizer, monkeypatch):
    for module in (adamw_rms, muon, optim):
        monkeypatch.setattr(module, "runs_kernels", lambda *_: True)
    config, model = make_config(optimizer=optimizer), make_model(500, shape=SHAPE | dict(num_layers=5))
    with compiling_for(86, monkeypatch) as kernels:
        optim.make_optimizer(model, config).update(0.1, torch.ones(()))
        needed = variants(kernels)
        kernels.clear()
        for work in optim.update_works(model.flat, config, torch.device("cpu")):
            work()
        ahead = variants(kernels)
    assert {name: hashes - ahead.get(name, set()) for name, hashes in needed.items()} == dict.fromkeys(needed, set())
    assert "adamw_rms" in needed and ("subtract_products" in needed) == (optimizer == "muon")


def packed(num_pairs):
    """MicroBatch of pairs of random lengths."""
    lengths = np.random.default_rng(num_pairs).integers(2, 20, size=(2, num_pairs))
    prompts, labels = (np.ones(column.sum(), dtype=np.int64) for column in lengths)
    sequences = Sequences((prompts, labels), lengths.T, ids=np.arange(num_pairs))
    return collate(sequences, Packing(0, kernels=True, dropout=True))


def variants(kernels):
    return {name: {kernel.hash for kernel in compiled} for name, compiled in kernels.items()}
