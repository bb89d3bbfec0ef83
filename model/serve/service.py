"""A model that the server answers with, its limits, and what it tells clients of itself."""

from dataclasses import asdict, dataclass, field

from model.generate.sampling import LIMITS
from model.serve.answering import ChatModel
from model.serve.decoding_thread import DecodingThread
from model.serve.server_metrics import ServerMetrics


@dataclass(frozen=True)
class Service:
    """What answers are made with, and their limits."""

    chat: ChatModel
    decoder: DecodingThread
    name: str  # of the model
    input_tokens: int  # of a prompt, at most
    new_tokens: int  # of an answer, at most
    single_turn: bool = False  # each question is answered by itself
    request_seconds: float = 300.0
    metrics: ServerMetrics = field(default_factory=ServerMetrics)  # one for all models of a server

    def entry(self) -> dict:
        """Its object in /v1/models: beside OpenAI's fields the settings in force and the limits, least and most."""
        defaults = asdict(self.chat.sampling) | dict(max_tokens=min(self.chat.max_new_tokens, self.new_tokens))
        del defaults["seed"]  # another for each request
        return dict(
            id=self.name, object="model", created=0, owned_by="you", single_turn=self.single_turn,
            max_prompt_tokens=self.input_tokens, defaults=defaults,
            limits=LIMITS | dict(max_tokens=(1, self.new_tokens)),
        )  # fmt: skip


def names_of(directories: list) -> list[str]:
    """A name for each model directory: its run's or its own, with more of the path where two would have one name.

    Raises ValueError if a directory is named twice.
    """
    resolved = [directory.resolve() for directory in directories]
    if len({*resolved}) < len(resolved):
        twice = next(path for path in resolved if resolved.count(path) > 1)
        raise ValueError(f"{twice} is named twice: name each model once")
    parts = [path.parts[1:-1] if _is_in_run(path) else path.parts[1:] for path in resolved]
    if len({*parts}) < len(parts):  # best and last of one run
        parts = [path.parts[1:] for path in resolved]
    length = 1
    while len({part[-length:] for part in parts}) < len(parts):
        length += 1
    return ["/".join(part[-length:]) for part in parts]


def _is_in_run(path):
    return path.name in ("best", "last") and len(path.parts) > 2
