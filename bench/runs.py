"""Parts of a run for measurements: stores of pairs, a run on the corpus, a step's context without data files."""

from model.commands.option_values import load_config
from model.commands.setup import prepare_run
from model.data.token_store import Source, open_store
from model.nn.base import Packing
from model.nn.loss_terms import LossTerms
from model.nn.registry import family_of
from model.nn.t5.batch import collate
from model.nn.t5.family import T5
from model.train.evaluate import Evaluation
from model.train.examples import Examples
from model.train.loader import Loader, Schedule
from model.train.lr_schedule import LearnRate
from model.train.objectives.pairs import Pairs
from model.train.step import StepContext


def open_pairs(path, tokenizer, max_seq_len, root):
    """The TokenStore of a file of pairs."""
    return open_store(Source((path,), Pairs(), tokenizer, max_seq_len), root)


def typed(words):
    """{option: text} of words like --option=text."""
    return dict(word.lstrip("-").split("=", 1) for word in words)


def prepare(ranks, options):
    """(Run, plan) of a training on the corpus (bench.corpus) in the working directory, as train_low_mem.py makes it."""
    own = dict(
        gradient_accumulation_steps=1, tokenizer_dir="tokenizer", train_file="train.parquet",
        validation_file="valid.parquet", epochs=1000, dropout=0,
    ) | options  # fmt: skip
    if "finetune_from_ckp_file" in own:  # which has both
        own = {name: value for name, value in own.items() if name not in ("model", "tokenizer_dir")}
    run, _, plan = prepare_run(ranks, load_config("pretrain", own), set(own), resumed=False)
    return run, plan


def context_of(ranks, model, optimizer, store, config, schedule):
    """StepContext of a run on `store`, anything with lengths and tokens like a TokenStore."""
    objective, family = Pairs(LossTerms(config.z_loss)), family_of(model.config)
    examples = Examples(store, objective, family, 0, config.seed, model.uses_kernels, model.dropout > 0)
    return StepContext(ranks, model, optimizer, Loader(ranks, examples, schedule), config)


def schedule_of(config, total_pairs, global_batch, warmup_pairs=0):
    rate = LearnRate(config.learn_rate, config.lr_schedule, warmup_pairs, total_pairs)
    return Schedule(total_pairs, global_batch, config.seed, rate)


def evaluation_of(context):
    """Evaluation of the loss on a context's own examples."""
    return Evaluation(context.ranks, context.model, context.loader.examples, None, 0, context.options.max_new_tokens)


def kernel_batch(store, ids):
    """T5's MicroBatch of the pairs `ids` for the Triton kernels."""
    return collate(Examples(store, Pairs(), T5, 0).sequences(ids, 1), Packing(0, True))
