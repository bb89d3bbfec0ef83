"""The position of a run, and its form in state.json. Reading refuses values that no run writes."""

from dataclasses import MISSING, asdict, dataclass, fields, replace

from config import DEFAULT_FAMILY, MAX_INT
from model.memory.oom_policy import PlanRecovery
from model.memory.plan import CHUNKS, MemoryPlan
from model.nn.lora import lora_from
from model.nn.registry import config_from, family_named
from model.train.spike_guard import WINDOW

MAX_NUMBER = 2**63 - 1  # ranks vote on int64
FORMAT = 4  # of state.json; format 0 has no `format` field. Fields that an older format lacks get TrainState's defaults


@dataclass(frozen=True)
class TrainState:
    """The position of a run, and what a resume compares or restores."""

    step: int = 0  # optimizer steps done
    pairs_seen: int = 0  # over all epochs
    first_batch: int = 1  # pairs per step at the run's first start; a warm-up step has this many pairs
    best_loss: float | None = None  # validation loss of best/
    best_step: int = 0
    best_metric: str = "loss"  # what best/ is best in
    best_score: float | None = None  # of best/ in best_metric, if that is not the loss
    evaluations_since_best: int = 0
    validation: str = ""  # identifies the pairs that best_loss was measured on, and how they were truncated
    seed: int = 0
    world_size: int = 1
    tokenizer_fingerprint: str = ""
    num_pairs: int = 0  # in the training files
    mixture: str = ""  # identifies how often an epoch takes each file; "": each row once
    ids_sha256: str = ""  # hash of their token ids, in order; empty if unknown
    max_seq_len: int = 0  # at which they were truncated, in tokens
    shape: dict | None = None  # fields of the model configuration, and the name of its family
    lora: dict | None = None  # fields of the LoraConfig if the checkpoint is an adapter's
    objective: str = "pairs"
    reference: str = ""  # identifies the weights that the objective's derived columns were computed with; "": none
    plan: dict | None = None  # fields of MemoryPlan
    device: str = "cuda"  # type of device that the plan is for; a CPU makes its own plan if a checkpoint lacks this
    growth: dict | None = None  # fields of PlanRecovery: when a shrunk plan may grow again
    evaluated_step: int = 0  # the last step that was evaluated
    recent_norms: tuple = ()  # of gradients, for the spike guard to compare with

    def without_best(self):
        """This state before its first evaluation: the next one writes best/, whatever its scores."""
        return replace(self, best_loss=None, best_step=0, best_score=None, evaluations_since_best=0, evaluated_step=0)

    def after(self, result):
        """The TrainState after the step of this StepResult."""
        recovery = result.position.recovery  # vars: asdict copies deeply, which takes longer than all else here
        return replace(
            self, step=result.step, pairs_seen=result.pairs_seen, plan=dict(vars(result.plan)),
            growth=vars(recovery) | dict(full=dict(vars(recovery.full))), recent_norms=result.position.recent_norms,
        )  # fmt: skip

    def differs(self, plan, world_size):
        """What changed since the checkpoint and alters the order of float additions ("plan", "processes")."""
        saved = self.plan and MemoryPlan(**self.plan)
        changed = dict(
            plan=saved and (saved.batching, saved.graphs) != (plan.batching, plan.graphs),
            processes=world_size != self.world_size,
        )
        return tuple(name for name, has_changed in changed.items() if has_changed)


def kept_recovery(state, plan, may_capture):
    """Plan recovery of a TrainState as plain values, or None if it has none or `plan` is not its plan.

    It leads back to CUDA graphs only if `may_capture`.
    """
    if not state.growth or state.plan != asdict(plan):
        return None
    full = state.growth["full"]
    return state.growth | dict(full=full | dict(graphs=full["graphs"] and may_capture))


class LaterFormat(ValueError):
    """A later version of this project wrote the checkpoint: it is intact, so no older one may take its place."""


def state_values(state):
    """The JSON values of a state.json for this TrainState."""
    return dict(format=FORMAT) | asdict(state)


def state_of(values):
    """The TrainState with the JSON `values` of a state.json.

    Raises ValueError for values that no run writes, LaterFormat (a ValueError) for a later format.
    """
    found_format = values.get("format", 0)
    if not _has_type(found_format, int):
        raise ValueError(f"state.json says format={found_format!r:.80}: it must be a whole number")
    if found_format > FORMAT:
        raise LaterFormat(
            f"is of format {found_format}, and this version reads up to {FORMAT}: resume with the version that wrote it"
        )
    values = (asdict(TrainState()) if found_format < FORMAT else {}) | values
    values.pop("format", None)
    norms = values.get("recent_norms")
    norms = tuple(norms) if isinstance(norms, list) else norms
    state = _parse_fields(TrainState, values | dict(recent_norms=norms), "state.json")
    if len(norms) > WINDOW or not all(_has_type(norm, float) for norm in norms):
        raise ValueError(f"its recent_norms are {str(norms):.200}: they must be at most {WINDOW} gradient norms")
    _check_shape(state.shape)
    if state.lora is not None:
        _check_lora(state.lora)
    if state.plan is not None:
        _check_plan(state.plan, state.shape, "its plan")
    if state.growth is not None:
        recovery = _parse_fields(PlanRecovery, state.growth, "its growth")
        _check_plan(recovery.full, state.shape, "the full plan of its growth")
        if not recovery.calm_steps < recovery.wait_steps:
            raise ValueError(f"its growth is {state.growth}: calm_steps must be below wait_steps")
    return state


def _check_shape(values):
    """Raise ValueError unless the JSON `values` are a model configuration of a known family."""
    if not isinstance(values, dict):
        raise ValueError(f"its shape is {values!r:.200}: it must be a model configuration")
    name = values.get("family", DEFAULT_FAMILY)
    family = family_named(name if isinstance(name, str) else repr(name))
    known = {
        f.name: f.default for f in fields(family.config_class) if f.default is not MISSING
    }  # older files lack some
    given = {key: values[key] for key in values if key != "family"}
    _parse_fields(family.config_class, known | given, "its shape")


def _check_lora(values):
    """Raise ValueError unless the JSON `values` are a LoraConfig."""
    try:
        lora_from(values)
    except TypeError as error:
        raise ValueError(f"its lora is {values!r:.200}: {error}") from None


def _check_plan(values, shape, what):
    """Raise ValueError unless the JSON `values` are a MemoryPlan with sizes that a plan can have.

    Older files say of activation checkpointing true (all blocks) or false: this becomes a number of blocks.
    """
    if isinstance(values, dict) and isinstance(values.get("gradient_checkpointing"), bool):
        values["gradient_checkpointing"] *= config_from(shape).num_blocks
    _parse_fields(MemoryPlan, values, what)
    limits = dict(micro_batch_tokens=(1, MAX_INT), chunk_tokens=(1, CHUNKS[0]), answers=(1, MAX_INT))
    limits["gradient_checkpointing"] = 0, config_from(shape).num_blocks
    for name, (least, most) in limits.items():
        if not least <= values[name] <= most:
            raise ValueError(f"{what} says {name}={values[name]}: it must be from {least} to {most}")


def _parse_fields(cls, values, what):
    """An instance of the dataclass `cls` with the JSON `values`.

    Raises ValueError, in which `what` names the values, for missing or unknown fields and for wrong types.
    """
    types = {field.name: field.type for field in fields(cls)}
    if not isinstance(values, dict) or values.keys() != types.keys():
        raise ValueError(f"{what} is {values!r:.200}, and must have the fields {', '.join(types)}")
    wrong = [f"{name}={values[name]!r:.80}" for name in types if not _has_type(values[name], types[name])]
    if wrong:
        raise ValueError(f"{what} says {', '.join(wrong)}: wrong type, or not from 0 to {MAX_NUMBER}")
    return cls(**values)


def _has_type(value, expected):
    """Whether a JSON value has the type of a field. Numbers must be from 0 to MAX_NUMBER."""
    if isinstance(value, bool):
        return expected is bool  # in Python a bool is an int too
    if expected is MemoryPlan:
        return isinstance(value, dict)
    if expected is tuple:
        return isinstance(value, tuple | list)
    return isinstance(value, expected) and (not isinstance(value, int | float) or 0 <= value <= MAX_NUMBER)
