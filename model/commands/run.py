"""A run that is ready for its steps."""

from dataclasses import dataclass, field
from pathlib import Path

from model.commands.recipe import Recipe
from model.commands.run_length import steps_between
from model.data.tokenizer import ChatTokenizer
from model.formats.carried import RECORD, record_of
from model.generate.sampling import generation_config
from model.nn.registry import family_of
from model.train.evaluate import Evaluation
from model.train.step import StepContext


@dataclass(frozen=True)
class Run:
    """The parts of a run that do not change between its steps."""

    recipe: Recipe
    tokenizer: ChatTokenizer
    context: StepContext
    evaluation: Evaluation | None  # None: nothing is evaluated
    memory: dict = field(default_factory=dict)  # predicted and measured bytes, as plan.json has them
    differs: tuple = ()  # what differs from the checkpoint, so that results may differ in their last bits

    @property
    def config(self):
        """The options as config.json records them."""
        return self.recipe.config

    @property
    def rules(self):
        return self.recipe.rules

    @property
    def dir(self):
        return Path(self.config.output_dir)

    @property
    def ranks(self):
        return self.context.ranks

    @property
    def draws(self):
        """Whether this rank draws plots."""
        return self.ranks.is_main and self.rules.draws_plots

    @property
    def model(self):
        return self.context.model

    @property
    def optimizer(self):
        return self.context.optimizer

    @property
    def schedule(self):
        return self.context.loader.schedule

    @property
    def train(self):
        """The Examples that are trained on."""
        return self.context.loader.examples

    @property
    def single_turn(self):
        """Whether every example is a question with nothing before it, so that the model learns no conversation."""
        meta = self.train.store.meta
        return self.config.single_turn or meta["rows"] > 0 and meta.get("single_pairs") == meta["rows"]

    @property
    def generation(self):
        """What the exported models' generation_config.json says."""
        values = self.settings(self.recipe.decoding)
        values |= dict(prefix=self.config.prompt_prefix) if self.config.prompt_prefix else {}
        record = record_of(values) | (dict(single_turn=True) if self.single_turn else {})
        return values | ({RECORD: record} if record else {})

    def settings(self, sampling):
        """What a generation_config.json says of answers with this Sampling."""
        reads_one_stream = family_of(self.model.config).reads_one_stream
        return generation_config(sampling, self.config.max_new_tokens, reads_one_stream)

    def total_steps(self, state):
        """Number of the run's last step, if every step after `state` has the current global batch."""
        schedule = self.schedule
        pairs = schedule.total_pairs, self.train.epoch_pairs
        return state.step + steps_between(state.pairs_seen, *pairs, schedule.global_batch)
