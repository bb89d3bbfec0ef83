"""What a server tells of its models is what it does."""

from pathlib import Path

import pytest

from model.generate.sampling import EXCLUDED, LIMITS, Sampling
from model.serve.service import names_of
from scripts.serve import parse_arguments


def test_models_have_names_that_differ():
    runs = [Path("/r/one/best"), Path("/r/two/last"), Path("/m/qwen")]
    assert names_of(runs) == ["one", "two", "qwen"]
    assert names_of([Path("/a/run/best"), Path("/b/run/best")]) == ["a/run", "b/run"]
    assert names_of([Path("/a/run/best"), Path("/a/run/last")]) == ["best", "last"]
    with pytest.raises(ValueError, match="/m/qwen is named twice: name each model once"):
        names_of([*runs, Path("/m/../m/qwen")])
    assert parse_arguments(["a", "--port", "1", "b"]).model_dirs == [Path("a"), Path("b")]


@pytest.mark.parametrize("name", LIMITS)
def test_the_limits_that_are_told_are_those_that_hold(name):
    for limit, beyond in zip(LIMITS[name], (-1, 1), strict=True):
        if EXCLUDED.get(name) != limit:
            Sampling(**{name: limit})
        for wrong in (limit + beyond, *([limit] if EXCLUDED.get(name) == limit else []), float("nan")):
            with pytest.raises(ValueError, match=f"{name}="):
                Sampling(**{name: wrong})
