"""Where a run stands, and the same as the plain values of a state.json: what no run writes is refused."""

from dataclasses import asdict, dataclass, fields, replace

from config import MOST_WHOLE, T5ModelConfig
from model.memory.estimate import ANSWERS_A_BATCH
from model.memory.oom_policy import PlanRecovery
from model.memory.plan import CHUNKS, MemoryPlan
from model.train.spike_guard import WINDOW

MOST = 2**63 - 1  # of a number: what a vote between ranks carries
FORMAT = 1  # of state.json; 0 has no `format`. Fields that an older one lacks take TrainState's defaults


@dataclass(frozen=True)
class TrainState:
    """Where a run stands."""

    step: int = 0  # optimizer steps done
    pairs_seen: int = 0  # over all epochs
    first_batch: int = 1  # pairs of a step at the run's first start: warm-up steps are counted in them
    best_loss: float | None = None  # validation loss of best/
    best_step: int = 0
    validation: str = ""  # which pairs best_loss is of, and how they are cut
    seed: int = 0
    world_size: int = 1
    tokenizer_fingerprint: str = ""
    num_pairs: int = 0  # of the training file
    ids_sha256: str = ""  # of their token ids, in order; empty: unknown
    max_seq_len: int = 0  # that these were cut to
    shape: dict | None = None  # of the model
    plan: dict | None = None  # how steps are cut
    device: str = "cuda"  # kind that the plan is for; where a checkpoint does not tell, a CPU plans the same again
    growth: dict | None = None  # of a plan that was shrunk
    evaluated_step: int = 0  # the last step that was evaluated
    recent_norms: tuple = ()  # gradient norms that the spike guard compares with

    def after(self, result):
        return replace(
            self, step=result.step, pairs_seen=result.pairs_seen, plan=asdict(result.plan),
            growth=asdict(result.recovery), recent_norms=result.recent_norms,
        )  # fmt: skip

    def differs(self, plan, world_size, exact):
        """Names of what will order a step's sums otherwise from here on: bits may differ then."""
        then = self.plan and MemoryPlan(**self.plan)
        changed = dict(
            plan=then and (then.cutting, then.graphs) != (plan.cutting, plan.graphs),
            processes=world_size != self.world_size and not exact,
        )
        return tuple(name for name, has_changed in changed.items() if has_changed)


class LaterFormat(ValueError):
    """A checkpoint of a later version of this project: whole, and not to be gone back past."""


def state_values(state):
    """A TrainState as the plain values of a state.json."""
    return dict(format=FORMAT) | asdict(state)


def state_of(values):
    """The TrainState in a state.json; raises ValueError for values that no run writes, LaterFormat where it is one."""
    written = values.get("format", 0)
    if not _fits(written, int):
        raise ValueError(f"state.json says format={written!r:.80}: it must be a whole number")
    if written > FORMAT:
        raise LaterFormat(
            f"is of format {written}, and this version reads up to {FORMAT}: go on with the version that wrote it"
        )
    values = (asdict(TrainState()) if written < FORMAT else {}) | values
    values.pop("format", None)
    norms = values.get("recent_norms")
    norms = tuple(norms) if isinstance(norms, list) else norms
    state = _record(TrainState, values | dict(recent_norms=norms), "state.json")
    if len(norms) > WINDOW or not all(_fits(norm, float) for norm in norms):
        raise ValueError(f"its recent_norms are {str(norms):.200}: they must be at most {WINDOW} gradient norms")
    _record(T5ModelConfig, state.shape, "its shape")
    if state.plan is not None:
        _check_plan(state.plan, "its plan")
    if state.growth is not None:
        growth = _record(PlanRecovery, state.growth, "its growth")
        _check_plan(growth.full, "the full plan of its growth")
        if not growth.calm_steps < growth.wait_steps:
            raise ValueError(f"its growth is {state.growth}: calm_steps must be below wait_steps")
    return state


def _check_plan(values, what):
    """Raise ValueError unless the JSON `values` are a MemoryPlan that steps can be cut by."""
    _record(MemoryPlan, values, what)
    largest = dict(micro_batch_tokens=MOST_WHOLE, chunk_tokens=CHUNKS[0], answers=ANSWERS_A_BATCH)
    for name, most in largest.items():
        if not 0 < values[name] <= most:
            raise ValueError(f"{what} says {name}={values[name]}: it must be from 1 to {most}")


def _record(kind, values, what):
    """A `kind` with these JSON `values`; raises ValueError, naming `what`, for other fields and for other types."""
    types = {field.name: field.type for field in fields(kind)}
    if not isinstance(values, dict) or values.keys() != types.keys():
        raise ValueError(f"{what} is {values!r:.200}, and must have the fields {', '.join(types)}")
    wrong = [f"{name}={values[name]!r:.80}" for name in types if not _fits(values[name], types[name])]
    if wrong:
        raise ValueError(f"{what} says {', '.join(wrong)}: of another type, or not from 0 to {MOST}")
    return kind(**values)


def _fits(value, kind):
    """Whether a JSON value has the type that a field names; numbers must be finite and not negative."""
    if isinstance(value, bool):
        return kind is bool  # Python takes it for a whole number too
    if kind is MemoryPlan:
        return isinstance(value, dict)
    return isinstance(value, kind) and (not isinstance(value, int | float) or 0 <= value <= MOST)
