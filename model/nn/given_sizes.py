"""Which sizes a model's configuration must be given."""

from dataclasses import MISSING, fields

PUBLISHED = "take the config.json that the model was published with"


def check_given(config_class, values):
    """Raise ValueError, with their names, if `values` lack fields of a dataclass that have no default."""
    required = [field.name for field in fields(config_class) if field.default is MISSING]
    if lacking := [name for name in required if name not in values]:
        raise ValueError(f"it lacks {', '.join(lacking)}, and a model needs {', '.join(required)}")
