"""A Screen finds the tokens that a product with the whole table finds."""

import pytest
import torch

from model.generate import screen
from model.generate.engine import Limits, generate
from model.generate.sampling import Sampling
from model.generate.screen import Screen
from tests.parts import make_model

WIDTH, VOCABULARY = 96, 3001


def normal(*size, seed=0):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


TABLES = {
    "normal": normal(VOCABULARY, WIDTH),
    "rows of unlike lengths": normal(VOCABULARY, WIDTH) * normal(VOCABULARY, 1, seed=1).exp(),
    "outliers": normal(VOCABULARY, WIDTH) + 30 * (normal(VOCABULARY, WIDTH, seed=2) > 3),
    "each row twice": normal(1501, WIDTH).repeat(2, 1),
    "nearly equal rows": normal(1, WIDTH) + 1e-4 * normal(VOCABULARY, WIDTH, seed=3),
    "zeros": torch.zeros(VOCABULARY, WIDTH),
}


@pytest.mark.parametrize("name", TABLES)
def test_the_likeliest_tokens_are_those_of_the_whole_product(name):
    table = TABLES[name]
    found = Screen(table, 100)
    for slots, scale in ((1, 1.0), (7, 1e-3), (100, 50.0)):
        hidden = normal(slots, WIDTH, seed=slots) * scale
        hidden[0] = 0 if slots == 7 else hidden[0]
        logits, tokens = hidden.double() @ table.double().T, found.likeliest(hidden)
        chosen, highest = logits.gather(1, tokens[:, None])[:, 0], logits.amax(dim=1)
        assert ((highest - chosen) <= 1e-6 * hidden.norm(dim=1) * table.norm(dim=1).max()).all()
        if name == "each row twice":
            assert (tokens < 1501).all(), "the first of equal ones"


def test_few_tokens_are_looked_at_where_logits_differ():
    table, hidden = normal(30_000, 512), normal(16, 512, seed=1)
    _, rows, _ = Screen(table, 16)._candidates(hidden)
    assert 16 <= len(rows) < 16 * screen.CANDIDATES


def test_greedy_answers_are_the_same_with_a_screen_and_drawn_ones_do_not_use_it(monkeypatch):
    model, draw = make_model(507), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.flat.trained[1:]:  # a tied embedding answers every token with itself
            p.mul_(4)
    inputs = [torch.randint(2, 507, (length,), generator=draw).tolist() for length in (3, 9, 20, 5, 7, 11)]
    limits, used = Limits(4, 20, 30, 0, 1), []
    plain = generate(model, inputs, limits, 30)
    monkeypatch.setattr(screen, "LEAST_NUMBERS", 1)
    monkeypatch.setattr(screen, "multiplies_integers", lambda: True)
    likeliest = Screen.likeliest
    monkeypatch.setattr(Screen, "likeliest", lambda self, hidden: used.append(len(hidden)) or likeliest(self, hidden))
    assert generate(model, inputs, limits, 30) == plain and len(used) > 30
    assert len({tuple(answer) for answer in plain}) == len(inputs), "answers that are all alike prove nothing"
    used.clear()
    generate(model, inputs, limits, 30, Sampling(temperature=0.5))
    generate(model, inputs, limits, 30, Sampling(repetition_penalty=1.2))
    assert not used


def test_only_a_cpu_with_right_and_fast_integer_products_gets_a_screen_and_no_run_that_must_repeat(monkeypatch):
    model, exact = make_model(507), lambda a, b: a.int() @ b.int()
    monkeypatch.setattr(screen, "LEAST_NUMBERS", 1)

    def screens(product, *seconds):
        screen.multiplies_integers.cache_clear()
        times = iter(seconds)
        monkeypatch.setattr(torch, "_int_mm", product)
        monkeypatch.setattr(screen, "_seconds", lambda work: next(times))
        return screen.screens(model)

    overflowing = lambda a, b: exact(a, b).clamp(min=-(2**15))  # noqa: E731
    assert screens(exact, 1, 3) and not screens(exact, 2, 3) and not screens(overflowing, 1, 3)
    assert screens(exact, 1, 3)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert not screens(exact, 1, 3)
    screen.multiplies_integers.cache_clear()


def test_a_screen_that_rules_out_too_little_gives_up_and_one_hidden_state_of_nan_spoils_no_other(monkeypatch):
    outlier, asked = (
        Screen(normal(VOCABULARY, WIDTH) * torch.where(torch.arange(VOCABULARY) == 7, 1e3, 1)[:, None], 4),
        [],
    )
    candidates = outlier._candidates
    monkeypatch.setattr(outlier, "_candidates", lambda hidden: asked.append(len(hidden)) or candidates(hidden))
    for seed in range(2 * screen.TRIES):
        hidden = normal(4, WIDTH, seed=seed)
        assert torch.equal(outlier.likeliest(hidden), (hidden @ outlier.table_VD.T).argmax(1))
    assert len(asked) < 2 * screen.TRIES
    hidden = normal(3, WIDTH)
    hidden[1, 5] = torch.nan
    tokens = Screen(TABLES["normal"], 3).likeliest(hidden)
    assert tokens[[0, 2]].tolist() == (hidden[[0, 2]] @ TABLES["normal"].T).argmax(1).tolist()
    assert 0 <= tokens[1] < VOCABULARY
