"""The columns of a token store that an objective needs of the weights at the run's start, read or computed."""

import logging

from model.commands.origin import read_weights
from model.commands.stored_options import ANOTHER_RUN
from model.data.file_list import names_of
from model.display.catalogue import texts_here
from model.display.console import Progress
from model.formats.adapters import adapter_directory, read_adapter
from model.formats.weights import LoadedWeights, load_into
from model.run.saver import checksum
from model.runtime.distributed import broadcast
from model.runtime.watchdog import untimed
from model.train.derive import derive, is_derived, with_derived

LOGGER = logging.getLogger("chat_trainer")


def read_derived(model, ranks, source, found, parts, plan):
    """(what identifies the weights that the derived columns are of, `parts` (Examples or None) with these columns).

    `model` has the weights that the run starts from; that of a run resumed from the Checkpoint `found` reads them again
    where the columns are lost, from the path `source` ("": they are random). Raises ValueError if they are there no
    more.
    """
    if not any(examples is not None and examples.objective.derived for examples in parts):
        return "", parts
    reference = found.state.reference if found else _identity(model)
    missing = [examples for examples in parts if examples is not None and not is_derived(ranks, examples, reference)]
    if missing and found:
        _read_start(model, ranks, source, reference)
    for examples in missing:
        _derive(model, ranks, examples, plan, reference)
    return reference, [examples if examples is None else with_derived(examples, reference) for examples in parts]


def with_reference(model, ranks, source, seed, examples, plan):
    """Examples to test a run's model on, with the columns that they need of the weights that the run started from.

    `model` gets these weights, from the path `source` or, where that is "", drawn from the seed. Without them it says
    so, and the columns stay zeros.
    """
    try:
        weights = read_weights(ranks, source)
    except ValueError as error:
        if ranks.is_main:
            LOGGER.warning(texts_here()("no_reference", error=error))
        return examples
    if not source:
        model.initialise(seed)
    elif ranks.is_main:
        load_into(model, weights, source)
    broadcast(ranks, model.flat.weights)
    reference = _identity(model)
    if not is_derived(ranks, examples, reference):
        _derive(model, ranks, examples, plan, reference)
    return with_derived(examples, reference)


def _identity(model):
    """What identifies a model's weights and how it computes with them."""
    return f"{checksum(model)} {model.compute_dtype}"


def _derive(model, ranks, examples, plan, reference):
    files = names_of([file["path"] for file in examples.store.meta["source"]["files"]])
    with untimed("computing what the objective needs of the weights at the start"):
        title = texts_here()("progress.reference", names=files)
        with Progress(title, len(examples), unit="pairs", shown=ranks.is_main) as progress:
            derive(ranks, model, examples, plan, reference, progress.update)


def _read_start(model, ranks, source, reference):
    """Give a resumed run's model the weights that the run started from, if they are not random."""
    if source and not model.lora:
        weights = read_weights(ranks, source)
        if ranks.is_main:
            load_into(model, weights, source)
    elif source and ranks.is_main and (directory := adapter_directory(source)):
        load_into(model, LoadedWeights(read_adapter(directory).tensors), source)
    broadcast(ranks, model.flat.weights)
    if not model.lora and str(checksum(model)) != reference.split()[0]:
        raise ValueError(
            f"the reference of this run, the weights that it started from, is needed again, and {source or 'the seed'} "
            f"gives other weights now: put these back, {ANOTHER_RUN}"
        )
