from model.display.durations import durations


def test_the_time_since_the_newest_start_is_divided_by_what_it_was_spent_on():
    lines = [
        dict(kind="start", time=0.0, startup_seconds=50.0), dict(kind="resume", step=0, time=0.0),
        dict(kind="train", step=10, step_seconds=9.0, time=90.0),
        dict(kind="start", time=100.0, startup_seconds=4.0), dict(kind="resume", step=10, time=100.0),
        dict(kind="train", step=14, step_seconds=0.5, time=102.0), dict(kind="save", step=14, snapshot_seconds=0.25),
        dict(kind="eval", step=14, seconds=1.5, time=104.0), dict(kind="train", step=20, step_seconds=1.0, time=110.0),
        dict(kind="save", step=20, error="disk full"),
    ]  # fmt: skip
    spent = durations(lines, now=112.0)
    assert spent == {"start-up": 4.0, "steps": 8.0, "evaluation": 1.5, "saves": 0.25, "rest": 2.25}
    assert sum(spent.values()) == 16.0


def test_a_journal_without_a_start_has_no_time():
    assert sum(durations([], now=5.0).values()) == 0
