from dataclasses import asdict, replace

import pytest
import torch

from config import MODELS, T5ModelConfig, load_config
from model.commands import setup
from model.commands.setup import check_memory_fits, kept_recovery
from model.memory.oom_policy import PlanRecovery
from model.memory.plan import NothingFits
from model.run.checkpoint import TrainState
from tests.parts import ALONE, PLAN

RECORDED = replace(PLAN, graphs=True)


def test_a_plan_without_cuda_graphs_recovers_them_only_if_the_resumed_run_may_record():
    growth = asdict(PlanRecovery(RECORDED, calm_steps=3))
    state = TrainState(plan=asdict(PLAN), growth=growth)
    assert kept_recovery(state, PLAN, may_record=True) == growth
    assert kept_recovery(state, PLAN, may_record=False) == asdict(PlanRecovery(PLAN, calm_steps=3))
    assert kept_recovery(state, RECORDED, may_record=True) is None


def test_a_model_that_cannot_fit_is_refused_with_its_bytes_before_anything_is_allocated(monkeypatch, store):
    shape = T5ModelConfig(**MODELS["chatlm"], vocab_size=40_960)
    config = load_config("pretrain", dict(optimizer="adamw_rms"))
    for gib, fits in ((8, True), (3, False)):
        monkeypatch.setattr(setup, "limit_memory", lambda *_, gib=gib: gib * 2**30)
        if fits:
            check_memory_fits(ALONE, config, shape, torch.float32, store.lengths, 16, 0)
        else:
            with pytest.raises(NothingFits, match="weights 0.73, bf16_weights 0.00, gradients 0.73, optimizer 1.47"):
                check_memory_fits(ALONE, config, shape, torch.float32, store.lengths, 16, 0)
