"""Real out of memory errors: of the CPU allocator under RLIMIT_DATA, and of a GPU under gpu_memory_limit_gb."""

import resource

import pytest
import torch

from model.train import gradients
from tests.ranks import run_ranks
from tests.tiny import furnish, ids_by_epoch, journal, words
from train_low_mem import main

MIB = 2**20


def data_bytes():
    """Bytes of this process that RLIMIT_DATA limits."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData"))


def train_with_little_memory(spare_mib, name):
    """A run that may allocate only `spare_mib` MiB more in its second step, which is its last.

    No checkpoint is written meanwhile: the limit holds for all threads, and safetensors' writer aborts without memory.
    """
    compute_gradients = gradients._compute_gradients

    def with_little_memory(context, plan, work, *args):
        if work.step == 2:
            limit = data_bytes() + spare_mib * MIB
            resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
        try:
            return compute_gradients(context, plan, work, *args)
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    gradients._compute_gradients = with_little_memory
    return main(words(
        output_dir=name, global_batch_size=44, warmup_steps=0, model="wide.json", micro_batch_tokens=4096,
        optimizer="adamw_rms", validation_file="", save_steps=1000, epochs=1,
    ))  # fmt: skip


def test_promise_4_a_step_in_which_the_cpu_allocator_really_fails_is_repeated_and_the_run_completes(tmp_path):
    furnish(tmp_path)
    lines = (tmp_path / "train.jsonl").read_text()
    (tmp_path / "train.jsonl").write_text(lines + lines)  # two steps in one epoch, at whose end it saves
    wide = '{"d_model": 512, "d_ff": 4096, "num_heads": 8, "d_kv": 64, "num_layers": 1, "num_decoder_layers": 1}'
    (tmp_path / "wide.json").write_text(wide)
    done = run_ranks(1, train_with_little_memory, 8, "tight", folder=tmp_path, seconds=120)
    assert done.codes == [0], done.text
    events = journal(tmp_path / "tight", "oom")
    assert events and {event["step"] for event in events} == {2}
    assert ids_by_epoch(tmp_path / "tight") == {1: list(range(88))}


def train_under_a_cap(name):
    return main(words(
        output_dir=name, global_batch_size=44, warmup_steps=0, model="wide.json", epochs=1, gpu_memory_limit_gb=2,
    ))  # fmt: skip


@pytest.mark.gpu
def test_promise_4_a_run_under_a_cap_of_2_gib_stays_below_it(tmp_path):
    furnish(tmp_path)
    wide = '{"d_model": 512, "d_ff": 2048, "num_heads": 8, "d_kv": 64, "num_layers": 6, "num_decoder_layers": 6}'
    (tmp_path / "wide.json").write_text(wide)
    done = run_ranks(1, train_under_a_cap, "capped", folder=tmp_path, seconds=240)
    assert done.codes == [0], done.text
    assert not journal(tmp_path / "capped", "oom")
    limits = journal(tmp_path / "capped", "start")[0]["memory"]
    assert limits["cap_bytes"] == 2 * 2**30 and limits["non_torch_bytes"] > 0
    assert limits["allocator_limit_bytes"] <= limits["cap_bytes"] - limits["non_torch_bytes"]
    assert max(line["reserved_bytes"] for line in journal(tmp_path / "capped", "train")) <= 2 * 2**30


def fill_the_gpu_in_step_2(name):
    """A run whose second step finds the GPU full before its first gradients."""
    compute_gradients, ballast = gradients._compute_gradients, []

    def with_little_memory(context, plan, work, *args):
        if work.step == 2 and not ballast:
            ballast.append(True)
            cap = int(4 * 2**30 / torch.cuda.get_device_properties(0).total_memory * 2**40) / 2**40
            held = torch.empty(int(3.2 * 2**30) - torch.cuda.memory_reserved(), dtype=torch.uint8, device="cuda")
            torch.cuda.set_per_process_memory_fraction(min(cap, 1.0))
            torch.empty(2 * 2**30, dtype=torch.uint8, device="cuda")  # over the cap: raises
            del held
        return compute_gradients(context, plan, work, *args)

    gradients._compute_gradients = with_little_memory
    return main(words(output_dir=name, global_batch_size=44, warmup_steps=0, epochs=3, gpu_memory_limit_gb=4))


@pytest.mark.gpu
def test_promise_4_a_step_in_which_the_gpu_really_runs_out_of_memory_is_repeated(tmp_path):
    furnish(tmp_path)
    done = run_ranks(1, fill_the_gpu_in_step_2, "full", folder=tmp_path, seconds=240)
    assert done.codes == [0], done.text
    assert [event["step"] for event in journal(tmp_path / "full", "oom")] == [2]
    assert ids_by_epoch(tmp_path / "full")[1] == list(range(44))
