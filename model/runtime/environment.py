"""Says in one line what to type where Python lacks the project's packages. Standard library only, for any Python 3."""

import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
OWN = ("model", "config", "scripts", "train_low_mem")  # one of these missing is a mistake of ours


def explain_missing_packages():
    """From now on a package that is missing ends the program with one line; ends it at once if Python is too old."""
    if sys.version_info < (3, 11):  # noqa: UP036
        sys.exit("this is Python {}.{}, and 3.11 is needed: {}".format(*sys.version_info[:2], _remedy()))
    sys.excepthook = _explain


def _explain(kind, error, trace):
    """Print one line for a package that is missing; other errors as Python does."""
    name = (getattr(error, "name", None) or "").split(".")[0]
    if issubclass(kind, ModuleNotFoundError) and name and name not in OWN:
        sys.stderr.write(f"{name} is not installed for {sys.executable}: {_remedy()}\n")
    else:
        sys.__excepthook__(kind, error, trace)


def _remedy():
    activate = os.path.join(os.path.relpath(ROOT), ".venv", "bin", "activate")
    if os.path.exists(activate):
        return f"type source {os.path.normpath(activate)} first"
    demo = os.path.normpath(os.path.join(os.path.relpath(ROOT), "scripts", "demo.sh"))
    return f"type bash {demo}, which makes .venv, then source .venv/bin/activate"
