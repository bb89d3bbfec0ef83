"""The table that the command `plan` prints."""

import math

from rich.cells import cell_len

from model.commands.expected_time import expected_text
from model.display.catalogue import texts_here
from model.display.console import padded
from model.memory.plan import USABLE

GIB = 2**30


def table(values):
    """Text of the table that `plan` prints for the values of `preview`."""
    plan, block, host, text = values["plan"], values["largest_block"], values["host"], texts_here()
    limit, lengths = values["machine"]["usable_bytes"], values["lengths"]
    weights, comma, inputs = values["ignored_weights"], text("comma"), host["input_bytes"]
    parts = comma.join(f"{text(f'part.{name}')} {gib(count)}" for name, count in values["fixed_bytes"].items())
    source = source_text(lengths["origin"], text)
    lines = [
        *[(text("plan.weights"), text("plan.weights.found", weights=weights, model=values["model"]))] * bool(weights),
        (text("plan.parameters"), text("plan.parameters.found", **_of(values, "parameters trained dtype"))),
        (text("plan.pairs"), text("plan.pairs.found", source=source, **_of(lengths, "pairs mean longest"))),
        (text("plan.steps"), _steps_text(text, **values["steps"])),
        (text("plan.optimizer"), text("plan.optimizer.found", **values["optimizer"])),
        (text("plan.expected"), expected_text(**values["expected"])),
        (text("plan.always"), parts),
        (text("plan.per_token"), f"{values['bytes_per_token'] / 1024:.1f} KiB"),
        (text("plan.card"),
         text("plan.card.none") if limit is None else text("plan.card.found", size=gib(limit), share=USABLE)),
        (text("plan.plan"), text("plan.plan.found", **plan)),
        *[(text("plan.offload"), text("plan.offload.found", size=gib(inputs)))] * bool(inputs),
        (text("plan.graphs"), text("plan.graphs.yes" if plan["graphs"] else "plan.graphs.no")),
        (text("plan.forwards"), text("plan.forwards.found", count=values["forwards"], pairs=values["share_pairs"])),
        *((text("plan.peak", phase=text(f"phase.{name}")),
           gib(count) if count <= (limit or math.inf) else text("plan.too_large", size=gib(count)))
          for name, count in values["phases"].items()),
        *[(text("plan.levers"), text("plan.levers.found"))] * bool(values["levers"]),
        *(_lever_line(text, lever) for lever in values["levers"]),
        *[_links_line(text, **values["links"])] * any(lever["sent_seconds"] is not None for lever in values["levers"]),
        (text("plan.ordinary"), text("plan.ordinary.found", gib=block["bytes"] / GIB, **block)),
        (text("plan.host"), text("plan.host.found", rank=gib(host["rank_bytes"]), main=gib(host["main_rank_bytes"]))),
        ("/dev/shm", text("plan.free", size=gib(host["shm_bytes"]), free=gib(host["shm_free_bytes"]))),
        (text("plan.disk"), text("plan.free", size=gib(host["disk_bytes"]), free=gib(host["disk_free_bytes"]))),
    ]  # fmt: skip
    width = max(cell_len(name) for name, _ in lines)
    return "\n".join(f"{padded(name, width)}  {found}" for name, found in lines)


def _of(values, names):
    return {name: values[name] for name in names.split()}


def source_text(source, text):
    """Where the lengths of a Sample come from, in words."""
    kind, values = source
    return text(f"source.{kind}", **values)


def _steps_text(text, pairs, count, warmup, problem):
    if not count:
        return text("plan.steps.unknown", pairs=pairs)
    warm = text("plan.warmup.unknown") if warmup is None else text("plan.warmup", steps=warmup)
    return text("plan.steps.found", count=count, pairs=pairs, warmup=problem or warm)


def _lever_line(text, lever):
    figures = dict(size=gib(lever["peak_bytes"]), factor=lever["time_factor"])
    said = text(
        "plan.lever.fits" if lever["fits"] else "plan.lever.too_large",
        tokens=lever["largest_micro_batch_tokens"], **figures,
    )  # fmt: skip
    if lever["sent_seconds"] is not None:
        said += text("plan.lever.sent", ms=1000 * lever["sent_seconds"])
    return text("plan.with", lever=text(f"lever.{lever['kind']}", value=lever["value"])), said


def _links_line(text, measured, **speeds):
    """The line of the links' speeds, and of how each is known."""
    how = {name: text("link.measured" if name in measured else "link.assumed") for name in speeds}
    found = [text(f"link.{name}", gigabytes=speed / 1e9, how=how[name]) for name, speed in speeds.items()]
    return text("plan.links"), text("comma").join(found)


def gib(count):
    return f"{count / GIB:.2f} GiB"
