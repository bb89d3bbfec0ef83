"""Where the time of a run went, from its journal."""


def durations(lines, now):
    """{kind: seconds} since the newest start: start-up, steps, evaluation, saves, and the rest.

    `lines` are those of read_journal, `now` is in Unix seconds. Saves count for the time in which they held up steps.
    """
    first = max((i for i, line in enumerate(lines) if line["kind"] == "start"), default=len(lines))
    lines = lines[first:]
    spent = {"start-up": 0.0} | spent_by(lines)
    if not lines:
        return spent | dict(rest=0.0)
    spent["start-up"] = lines[0].get("startup_seconds", 0.0)
    total = spent["start-up"] + now - lines[0]["time"]
    return spent | dict(rest=max(total - sum(spent.values()), 0.0))


def spent_by(lines):
    """{kind: seconds} of steps, evaluations and saves in these lines, also those of several starts."""
    spent, step = {"steps": 0.0, "evaluation": 0.0, "saves": 0.0}, 0
    for line in lines:
        if line["kind"] == "resume":
            step = line["step"]
        elif line["kind"] == "train":
            spent["steps"] += line["step_seconds"] * (line["step"] - step)
            step = line["step"]
        elif line["kind"] == "eval":
            spent["evaluation"] += line.get("seconds", 0.0)
        elif line["kind"] == "save":
            spent["saves"] += line.get("snapshot_seconds", 0.0)
    return spent
