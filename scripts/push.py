"""Send a model to the Hugging Face Hub, into a private repository unless --public is given.

    python scripts/push.py DIR USER/NAME [--public] [--base ORGANISATION/NAME] [--dry_run] [--yes]

DIR is a model's directory, an adapter's, what scripts/export.py wrote, or a run directory (its best/, else its last/).
What will be sent is listed first, then asked for. Checkpoints, token stores and logs are never sent. An adapter is sent
with its base's name on the Hub in place of a directory; a model's card names what --base says that it was trained from.
It needs a token: hf auth login. Exit codes: 0 sent or listed, 2 refused, 1 the Hub or the network.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from model.runtime.environment import explain_missing_packages  # noqa: E402

explain_missing_packages()

from model.commands.option_names import ScriptParser  # noqa: E402
from model.commands.publishing import Parcel, check_name, parcel_of, send  # noqa: E402
from model.display.catalogue import texts_here  # noqa: E402
from model.runtime.terminal import printable, printable_lines  # noqa: E402


def parse_options(words: list[str]) -> argparse.Namespace:
    parser = ScriptParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("repo", metavar="USER/NAME")
    parser.add_argument("--public", action="store_true", help="everybody may read it")
    parser.add_argument(
        "--base", default="", help="name on the Hub of the model that was trained, unless its cache tells"
    )
    parser.add_argument("--dry_run", action="store_true", help="list what would be sent, and send nothing")
    parser.add_argument("--yes", action="store_true", help="send without asking")
    return parser.parse_args(words)


def list_files(parcel: Parcel, options: argparse.Namespace) -> None:
    text = texts_here()
    access = text("push.public" if options.public else "push.private")
    print(text("push.from", directory=parcel.directory, repo=options.repo, access=access))
    for name, size in parcel.sizes.items():
        print(f"  {size / 2**20:10.2f} MiB  {name}")
    print(text("push.total", count=len(parcel.files), size=sum(parcel.sizes.values()) / 2**20))
    if parcel.left:
        print(text("push.left", names=printable(", ".join(parcel.left))))
    if parcel.base:
        print(text("push.base", base=parcel.base))


def is_wanted(options: argparse.Namespace) -> bool:
    """Whether to send, asked for on a terminal. Raises ValueError where nobody can be asked."""
    if options.yes or options.dry_run:
        return not options.dry_run
    if not sys.stdin.isatty():
        raise ValueError("nobody can be asked here: add --yes to send this, or --dry_run to list it alone")
    return input(texts_here()("push.ask")).strip().lower() in ("y", "yes", "是")


def main(words: list[str]) -> int:
    options = parse_options(words)
    try:
        check_name(options.repo)
        parcel = parcel_of(options.directory, options.base)
        list_files(parcel, options)
        if not is_wanted(options):
            print(texts_here()("push.nothing"))
        else:
            print(texts_here()("push.sent", address=send(parcel, options.repo, options.public)))
    except (ValueError, RuntimeError, OSError) as error:
        print(printable_lines(str(error)), file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
