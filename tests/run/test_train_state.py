"""A state.json that no run writes is refused, and those of older formats are read."""

import json
import math
import re
from dataclasses import asdict, fields

import pytest

from model.run.checkpoint import load_newest, read_checkpoint
from model.run.train_state import FORMAT, LaterFormat, TrainState, state_values
from tests.run.test_checkpoint import change_state


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("step", -1, "state.json says step=-1"), ("step", "5", "step='5'"), ("step", 501, "is of step 501"),
        ("pairs_seen", 10**30, "pairs_seen=1000"), ("seed", True, "seed=True"), ("best_loss", "low", "best_loss='low'"),
        ("best_loss", math.nan, "best_loss=nan"), ("unknown", 1, "must have the fields"),
        ("format", "1", "format='1'"), ("ids_sha256", 5, "ids_sha256=5"),
        ("world_size", ..., "must have the fields step, pairs_seen"), ("recent_norms", [1.0, -1.0], "gradient norms"),
        ("recent_norms", [math.inf], "gradient norms"), ("recent_norms", [1.0] * 65, "at most 64 gradient norms"),
        ("recent_norms", "a", "recent_norms='a'"), ("shape", None, "its shape is None"),
        ("shape.d_model", 0, "d_model=0"), ("shape.d_model", 65_536, "of another shape"),
        ("shape.num_layers", 3, "tensors missing"), ("plan", [], "plan="), ("plan", {}, "its plan is {}"),
        ("plan.odd", 1, "its plan is"), ("plan.answers", ..., "its plan is"),
        ("plan.micro_batch_tokens", 0, "must be from 1"), ("plan.micro_batch_tokens", 2**63 - 1, "must be from 1"),
        ("plan.micro_batch_tokens", 1e3, "micro_batch_tokens=1000.0"),
        ("plan.chunk_tokens", 8193, "chunk_tokens=8193: it must be from 1 to 8192"),
        ("plan.answers", 0, "answers=0: it must be from 1"),
        ("plan.graphs", 1, "graphs=1"), ("plan.gradient_checkpointing", "no", "gradient_checkpointing='no'"),
        ("plan.gradient_checkpointing", 5, "gradient_checkpointing=5: it must be from 0 to 4"),
        ("growth", {}, "its growth is {}"), ("growth.full", None, "full=None"),
        ("growth.full.chunk_tokens", 0, "the full plan of its growth"), ("growth.wait_steps", 0, "below wait_steps"),
    ],
)  # fmt: skip
def test_a_state_that_no_run_writes_is_refused_even_if_its_sha256_matches(save, name, value, said):
    path = save(500)
    change_state(path, {name: value})
    with pytest.raises(ValueError, match=f"is damaged .*{re.escape(said)}"):
        read_checkpoint(path)


STATE_OF_FORMAT_0 = """{
 "step": 8, "pairs_seen": 60, "first_batch": 8, "best_loss": 6.167487502541241, "best_step": 6,
 "validation": "3b12de98369dcf782202509e1e890bb602f0d24bb22b8b60498172c174f2c3c2 32 ['', '']", "seed": 23333,
 "world_size": 1, "tokenizer_fingerprint": "b951d8a816c311c2", "num_pairs": 44, "shape": %s,
 "plan": {"micro_batch_tokens": 512, "chunk_tokens": 1024, "gradient_checkpointing": false,
  "predicted_peak_bytes": 104028323, "graphs": false, "answers": 32},
 "growth": {"full": {"micro_batch_tokens": 512, "chunk_tokens": 1024, "gradient_checkpointing": false,
   "predicted_peak_bytes": 104028323, "graphs": false, "answers": 32}, "calm_steps": 0, "wait_steps": 100},
 "evaluated_step": 6, "recent_norms": []
}"""


def test_a_state_of_format_0_is_read_with_defaults_for_the_fields_that_it_lacks(save, model):
    path = save(8)
    written = json.loads(STATE_OF_FORMAT_0 % json.dumps(asdict(model.config)))
    change_state(path, written | dict.fromkeys({"format"} | {f.name for f in fields(TrainState)} - written.keys(), ...))
    assert "format" not in (path / "state.json").read_text()
    state = read_checkpoint(path).state
    assert (state.ids_sha256, state.max_seq_len) == ("", 0)
    assert {name: value for name, value in state_values(state).items() if name in written} == written | dict(
        recent_norms=()
    )
    for path_to, was, blocks in (("plan", True, 4), ("plan", False, 0), ("growth.full", True, 4)):
        change_state(path, {f"{path_to}.gradient_checkpointing": was})
        state = read_checkpoint(path).state
        plan = state.plan if path_to == "plan" else state.growth["full"]
        assert plan["gradient_checkpointing"] == blocks and type(plan["gradient_checkpointing"]) is int


def test_a_checkpoint_of_a_later_format_is_refused_and_not_replaced_by_an_older_one(save, tmp_path):
    save(400)
    change_state(save(500), {"format": FORMAT + 1, "a_later_field": 1})
    with pytest.raises(LaterFormat, match=f"step_00000500 is of format {FORMAT + 1}, and this version reads up to"):
        load_newest(tmp_path, pytest.fail)


def test_the_fields_of_a_state_are_those_of_its_format():
    """To add a field, give it a default, raise FORMAT and list it here: checkpoints without it stay readable."""
    added = {1: {"ids_sha256", "max_seq_len", "device"}, 2: {"objective", "reference"}, 3: {"lora"}}
    added[4] = {"best_metric", "best_score", "evaluations_since_best", "mixture"}
    format_0 = json.loads(STATE_OF_FORMAT_0 % "{}").keys()
    assert {f.name for f in fields(TrainState)} == format_0 | set().union(*added.values())
    assert max(added) == FORMAT
