"""The examples of a run: its files tokenised, the same rows on all ranks."""

import logging
from dataclasses import replace
from functools import partial

from model.commands.objective import on_rows
from model.commands.run_files import files_of, train_files
from model.commands.tokenising import write_beside
from model.data.file_list import names_of
from model.data.row_hashes import shared_rows
from model.data.sampler import mixture_of
from model.data.token_store import Source, open_store
from model.display.catalogue import texts_here
from model.display.console import Progress
from model.run.run_dir import TOKENS_DIR
from model.runtime.distributed import agree, local_main_first
from model.runtime.watchdog import stop_asked
from model.train.derive import with_zeros
from model.train.examples import Examples, check_lengths
from model.train.objectives.mixed import Mixed

LOGGER = logging.getLogger("chat_trainer")
EVALUATION_SEED = 0  # whatever the run's: what is drawn of the texts to evaluate on is the same in all runs


def open_data(ranks, recipe, tokenizer):
    """(Examples to train on, Examples to evaluate on or None where nothing is evaluated).

    Warns of pairs that are in both. Raises ValueError for files that cannot be read.
    """
    files = train_files(recipe.config)
    train = open_examples(ranks, recipe, tokenizer, files)
    mixture = mixture_of(train.store.rows_of_files, [file.weight for file in files])
    places = recipe.config.against_loops != "none"
    train = replace(train, places=places, mixture=mixture)
    if not recipe.config.validation_file:
        return train, None
    files = files_of(recipe.config, "validation_file")
    validation = open_examples(ranks, recipe, tokenizer, files, evaluated=True)
    if ranks.is_main and (shared := shared_text(validation.store, train.store, texts_here())):
        LOGGER.warning(shared)
    return train, validation


def shared_text(validation, train, text):
    """One line about the rows that both TokenStores have; "" if there are none."""
    rows, firsts = shared_rows(validation, train)
    kind = "chunks" if validation.meta.get("chunks") else "pairs"
    return text(f"shared.{kind}", rows=rows, count=len(validation), firsts=firsts) if rows or firsts else ""


def open_examples(ranks, recipe, tokenizer, files, evaluated=False):
    """Examples of these DataFiles, tokenised first if needed; the same rows on all ranks.

    Raises ValueError for rows, and answers where they are `evaluated`, that are longer than the network can read.
    """
    config, source = recipe.config, source_of(recipe, tokenizer, files)
    names = names_of(source.paths)
    with Progress(texts_here()("progress.tokenising", names=names), None, unit="rows", shown=ranks.is_main) as progress:
        opened = partial(open_store, source, TOKENS_DIR, progress.update, stop_asked, write_beside)
        store = local_main_first(ranks, opened)
    agree(ranks, f"the pairs in {names}", dict(pairs=len(store), ids_sha256=store.meta["ids_sha256"]))
    first_id = recipe.family.first_id(recipe.model_config, tokenizer)
    objective = on_rows(source.objective, store.rows_of_files)
    seed = EVALUATION_SEED if evaluated else config.seed
    examples = Examples(store, objective, recipe.family, first_id, seed, recipe.spec.kernels)
    examples = with_zeros(examples) if objective.derived else examples
    new_tokens = config.max_new_tokens if evaluated and recipe.num_answers else 0
    check_lengths(examples, recipe.model_config.max_tokens, new_tokens)
    return examples


def source_of(recipe, tokenizer, files):
    """The Source of a token store of these DataFiles."""
    columns = (recipe.config.prompt_column, recipe.config.response_column)
    paths, objective = tuple(file.path for file in files), recipe.objective_on(files)
    readers = objective.readers if isinstance(objective, Mixed) else ()
    return Source(paths, objective, tokenizer, recipe.config.max_seq_len, columns, readers)
