"""The end of a run that cannot go on, and what that of a run without further steps may lack."""

from dataclasses import asdict

from model.commands.decoding import choose_decoding, decoding_line
from model.commands.exporting import export_last, is_early
from model.commands.run_events import say
from model.memory.plan import NothingFits
from model.run.journal import Journal, last_stop
from model.run.run_dir import has_last
from model.runtime.distributed import vote
from model.runtime.laps import laps


def complete(run, state):
    """Write what is missing: last/, the choice of how the models answer, or the journal's line that says so.

    A run that ended before its line had a word of that choice is left as it is.
    """
    if not has_last(run.dir):  # its export may have failed
        export_last(run, state)
    if not run.ranks.is_main:
        return
    stop = last_stop(run.dir)
    is_told = stop.get("reason") == "finished"  # a stop may have come after its last step
    decoding = None if is_told and stop.get("decoding", {}) is not None else choose_decoding(run, state)
    if not is_told or decoding:
        with Journal(run.dir / "metrics.jsonl") as journal:
            early = is_early(run, state)
            journal.write("stop", step=state.step, reason="finished", early=early, startup=laps(), decoding=decoding)
    if decoding:
        say(run.ranks, decoding_line(run, decoding))


def give_up(run, journal, saver, state, error, last):
    """Save `state`, unless the StepResult `last` left its weights in doubt, and write the failure to the journal."""
    if last is None or not last.in_doubt:  # a doubtful checkpoint would replace a good one
        saver.save(state, run.model, run.optimizer)
    saver.join()
    vote(run.ranks, 0)  # waits for rank 0 to write: a rank that fails ends the others
    if isinstance(error, NothingFits):
        tried = error.plan and asdict(error.plan)
        journal.write("oom", step=state.step + 1, where="anywhere", rank=None, before=tried, after=None)
    journal.write("stop", step=state.step, reason="failed")
