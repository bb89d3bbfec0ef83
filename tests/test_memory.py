import errno
from dataclasses import replace

import pytest
import torch

from config import MODELS, T5ModelConfig
from model.faults import ERRORS
from model.memory import MemoryPlan, choose_plan, is_out_of_memory, predict_peak_bytes, shrink_plan
from tests.parts import make_config

GIB = 2**30
SMALL = T5ModelConfig(**MODELS["small"], vocab_size=8192)
PARAMETERS = 48_000_000


def predict(tokens, checkpointing=False, chunk_tokens=2048, dtype=torch.bfloat16, **options):
    return predict_peak_bytes(make_config(**options), SMALL, PARAMETERS, tokens, chunk_tokens, checkpointing, dtype)


def choose(free_gib, share_tokens=20_000, longest_tokens=512, **options):
    free_bytes = None if free_gib is None else int(free_gib * GIB)
    return choose_plan(
        make_config(**options), SMALL, PARAMETERS, free_bytes, torch.bfloat16, share_tokens, longest_tokens
    )


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_prediction_grows_with_tokens_and_with_chunks(checkpointing):
    by_tokens = [predict(tokens, checkpointing) for tokens in range(512, 200_000, 512)]
    assert by_tokens == sorted(by_tokens)
    assert by_tokens[-1] > 2 * by_tokens[0]
    assert predict(50_000, checkpointing, chunk_tokens=4096) > predict(50_000, checkpointing)


def test_checkpointing_bf16_and_adafactor_are_predicted_to_save_memory():
    assert predict(50_000, checkpointing=True) < predict(50_000) / 2
    assert predict(50_000) < predict(50_000, dtype=torch.float32)
    assert predict(50_000, optimizer="adafactor") == predict(50_000) - 8 * PARAMETERS


def test_the_prediction_holds_weights_gradients_and_optimizer_at_least():
    assert predict(1) > PARAMETERS * (4 + 4 + 8)


def test_plenty_of_memory_takes_a_whole_share_in_one_forward():
    plan = choose(80)
    assert (plan.micro_batch_tokens, plan.gradient_checkpointing) == (20_000, False)
    assert choose(80, share_tokens=100).micro_batch_tokens == 512
    assert choose(1000, share_tokens=10**9).micro_batch_tokens < 10**6


def test_a_plan_fits_what_is_free_and_says_its_peak():
    for free_gib in (2, 3, 4, 8, 20):
        plan = choose(free_gib)
        assert plan.predicted_peak_bytes <= free_gib * GIB
        assert plan.predicted_peak_bytes == predict(plan.micro_batch_tokens, plan.gradient_checkpointing)
    assert choose(2).micro_batch_tokens < choose(20).micro_batch_tokens


def test_a_micro_batch_that_is_named_is_the_one_used():
    for tokens in (512, 5000, 100_000):
        for free_gib in (None, 4, 80):
            assert choose(free_gib, micro_batch_tokens=tokens).micro_batch_tokens == tokens


@pytest.mark.parametrize("free_gib", [None, 80])
def test_a_micro_batch_below_the_longest_example_is_refused(free_gib):
    with pytest.raises(ValueError, match="micro_batch_tokens=511.*longest example has 512 tokens"):
        choose(free_gib, micro_batch_tokens=511)


def test_checkpointing_comes_only_where_no_micro_batch_fits_without_it():
    longest = 20_000
    plain, checkpointed = (predict(longest, checkpointing) / 0.8 / GIB for checkpointing in (False, True))
    between = (plain + checkpointed) / 2
    assert not choose(plain * 1.01, longest_tokens=longest).gradient_checkpointing
    assert choose(between, longest_tokens=longest).gradient_checkpointing
    assert choose(80, gradient_checkpointing="True").gradient_checkpointing
    with pytest.raises(RuntimeError):
        choose(between, longest_tokens=longest, gradient_checkpointing="False")


def test_the_longest_example_alone_is_tried_before_giving_up():
    longest, share = 12_000, 20_000
    enough = predict(longest) / 0.8 / GIB * 1.01
    assert enough < predict(share) / 0.8 / GIB
    plan = choose(enough, share_tokens=share, longest_tokens=longest)
    assert (plan.micro_batch_tokens, plan.gradient_checkpointing) == (longest, False)


def test_what_cannot_fit_is_refused_with_numbers():
    with pytest.raises(RuntimeError) as refusal:
        choose(0.25, longest_tokens=512, max_seq_len=256)
    needed = predict(512, checkpointing=True, max_seq_len=256) / GIB
    assert f"512 tokens needs about {needed:.2f} GiB and 0.25 GiB" in str(refusal.value)
    assert "--max_seq_len (now 256)" in str(refusal.value)


def test_a_cpu_takes_moderate_micro_batches():
    plan = choose(None, share_tokens=10**6)
    assert 512 <= plan.micro_batch_tokens <= 16_384
    assert not plan.gradient_checkpointing


@pytest.mark.parametrize("start", [MemoryPlan(131_072, 2048, False, 0), MemoryPlan(513, 1024, True, 0)])
def test_shrinking_makes_each_plan_smaller_and_ends(start):
    plans = [start]
    while (smaller := shrink_plan(plans[-1], longest_tokens=512)) is not None:
        assert smaller != plans[-1]
        assert smaller.micro_batch_tokens <= plans[-1].micro_batch_tokens
        assert smaller.chunk_tokens <= plans[-1].chunk_tokens
        assert smaller.gradient_checkpointing >= plans[-1].gradient_checkpointing
        plans.append(smaller)
        assert len(plans) < 20
    assert plans[-1] == replace(start, micro_batch_tokens=512, chunk_tokens=128, gradient_checkpointing=True)


def test_shrinking_leaves_a_micro_batch_already_below_the_longest_example():
    assert shrink_plan(MemoryPlan(100, 128, False, 0), 512) == MemoryPlan(100, 128, True, 0)
    assert shrink_plan(MemoryPlan(100, 128, True, 0), 512) is None


@pytest.mark.parametrize("kind", ["oom", "cublas", "cudnn", "nccl", "cpu"])
def test_out_of_memory_is_known_under_all_its_names(kind):
    assert is_out_of_memory(ERRORS[kind]())


def test_a_real_failed_allocation_is_known():
    with pytest.raises(RuntimeError) as failure:
        torch.empty(2**60)
    assert is_out_of_memory(failure.value)
    assert is_out_of_memory(MemoryError())


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("NCCL error: remote process exited or there was a network error"),
        RuntimeError("CUDA error: device-side assert triggered"),
        ValueError("out of memory"),
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        KeyboardInterrupt(),
    ],
    ids=repr,
)
def test_other_failures_are_not_taken_for_out_of_memory(error):
    assert not is_out_of_memory(error)
