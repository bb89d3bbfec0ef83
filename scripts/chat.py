"""Talk with a trained model: it answers questions typed in the terminal or read from a pipe, one per line.

    python scripts/chat.py [MODEL_DIR] [--temperature 0.7] [--top_p 0.9] [--max_new_tokens 256]
    python scripts/chat.py model_save/sft_fast < questions.txt > answers.txt

MODEL_DIR is a Hugging Face directory, an adapter's or a run's; default: the newest model_save/*/best. What is not given
is what the model's generation_config.json says. In the terminal the model is shown the conversation so far, unless it
was trained on single questions; questions from a pipe are answered each by itself. --single_turn=True or False says
otherwise.
/reset begins anew, /undo takes the last question back, /save FILE writes the conversation, /settings shows how answers
are chosen, /settings temperature 0.7 changes it, /settings thinking on (off, default) whether it thinks first; exit,
quit and Ctrl+D end the program. In the terminal a thought is dimmed, cls clears the screen, and Ctrl+C stops an answer,
else it ends the program. Tools that the model calls are shown, and not run.
From a pipe each line gets one line, without the thought: a newline in an answer is written \\n, a carriage return
\\r, a backslash \\\\; a line without a question, or with one that cannot be read, gets an empty line.
"""

import argparse
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from model.runtime.cgroup import limit_threads  # noqa: E402
from model.runtime.environment import explain_missing_packages  # noqa: E402

explain_missing_packages()
limit_threads()
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # only local files are read

from model.commands.option_names import ScriptParser, true_or_false, with_value  # noqa: E402
from model.data.answer_parts import Said, join_parts  # noqa: E402
from model.data.cleaning import clean_text  # noqa: E402
from model.data.conversation import Turn  # noqa: E402
from model.display.catalogue import texts_here  # noqa: E402
from model.generate.sampling import Sampling  # noqa: E402
from model.run.journal import read_journal  # noqa: E402
from model.runtime.terminal import printable  # noqa: E402
from model.serve.answering import ChatModel, load_chat_model, prompt_ids, stream_answer  # noqa: E402
from model.serve.openai_messages import message_of  # noqa: E402

with suppress(ImportError):
    import readline  # noqa: F401  # gives input() a history and correct deletion of wide characters

MAX_PROMPT_TOKENS = 2048  # the encoder's memory grows with the square of the length
HARDLY_TRAINED_LOSS = 4.0  # nats per token: answers are hardly better than frequent words
CLEAR_SCREEN = "\033[2J\033[3J\033[H"
DIM, NOT_DIM = "\033[2m", "\033[22m"
FILTERS = {"top_k", "top_p", "min_p"}  # of the tokens to draw from: they need a temperature
ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", "\r": r"\r"})  # of an answer to a pipe, which is one line
SETTINGS = {f.name: f.type for f in fields(Sampling)} | dict(max_new_tokens=int, thinking=str)
THINKING = dict(on=True, off=False, default=None)


@dataclass
class Talk:
    """A conversation and how its answers are chosen."""

    chat: ChatModel
    sampling: Sampling
    max_new_tokens: int
    single_turn: bool = False  # what was said before is not shown to the model
    thinking: bool | None = None  # before an answer; None: as the model's template has it
    turns: list[Turn] = field(default_factory=list)

    def ask(self, question: str) -> Iterator[Said]:
        """Yield the answer in pieces and remember what was given. Raises ValueError if the question cannot be read.

        The next answer has the next seed, so that a question that is asked again gets another answer.
        """
        most = self.chat.prompt_tokens(MAX_PROMPT_TOKENS, self.max_new_tokens)
        asked = [*([] if self.single_turn else self.turns), Turn("user", question)]
        ids, given = prompt_ids(self.chat, asked, most, thinking=self.thinking), []
        try:
            for part in stream_answer(self.chat, ids, self.sampling, self.max_new_tokens, self.thinking):
                given.append(part)
                yield part
        finally:  # it may be stopped before its end
            self.sampling = replace(self.sampling, seed=(self.sampling.seed + 1) % 2**63)
            answer = join_parts(given)
            if any(answer):
                self.turns += [asked[-1], Turn("assistant", answer.text, answer.thought, answer.calls)]

    def set(self, name: str, text: str) -> None:
        """Change a setting; raises ValueError for an unknown name and for a number out of range."""
        if name not in SETTINGS:
            raise ValueError(f"{name} is no setting: {', '.join(SETTINGS)}")
        try:
            value = SETTINGS[name](text)
        except ValueError:
            raise ValueError(f"{name}={text}: must be a {SETTINGS[name].__name__}") from None
        if name == "max_new_tokens":
            if value < 1:
                raise ValueError(f"max_new_tokens={value}: must be at least 1")
            self.max_new_tokens = value
        elif name == "thinking":
            if value not in THINKING:
                raise ValueError(f"thinking={value}: must be on, off or default")
            self.thinking = THINKING[value]
        else:
            self.sampling = replace(self.sampling, **{name: value})

    def settings(self) -> str:
        values = asdict(self.sampling) | dict(max_new_tokens=self.max_new_tokens)
        thinking = next(name for name, value in THINKING.items() if value is self.thinking)
        return ", ".join([*(f"{name} {value:g}" for name, value in values.items()), f"thinking {thinking}"])


def main(argv: list[str]) -> int:
    options = parse_arguments(argv)
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    try:
        chat = load_chat_model(options.model_dir or newest_model())
        single_turn = chat.single_turn or not interactive if options.single_turn is None else options.single_turn
        talk = Talk(chat, chat.sampling, chat.max_new_tokens, single_turn)
        apply(options, talk)
        prepare_streams()
        if interactive:
            greet(chat, is_told=options.single_turn is not None)
        for line in read_lines(interactive):
            respond(talk, line, interactive)
    except ValueError as error:
        print(printable(str(error)), file=sys.stderr)
        return 2
    except (EOFError, KeyboardInterrupt):
        if interactive:
            print()
    return 0


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = ScriptParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", nargs="?", type=Path)
    parser.add_argument(
        "--single_turn", type=true_or_false, metavar="True|False", help="answer each question by itself"
    )
    parser.add_argument("--temperature", help="0: always the likeliest token; above: tokens are drawn")
    parser.add_argument("--top_k", help="draw from so many of the likeliest tokens; 0: from all")
    parser.add_argument("--top_p", help="draw from the likeliest tokens that have this probability together")
    parser.add_argument("--min_p", help="draw from tokens at least this times as likely as the likeliest")
    parser.add_argument("--repetition_penalty", help="above 1: tokens that the answer has become less likely")
    parser.add_argument("--no_repeat_ngram_size", help="no run of so many tokens comes twice; 0: it may")
    parser.add_argument("--seed", help="of the first answer, the next one has the next; equal seeds draw equally")
    parser.add_argument("--max_new_tokens", help="most tokens in an answer")
    parser.add_argument("--thinking", help="on or off: whether to think first, for a model that has learnt both")
    return parser.parse_args(with_value(argv, "--single_turn"))


def apply(options: argparse.Namespace, talk: Talk) -> None:
    """Set what was typed; raises ValueError for numbers out of range. A filter without a temperature draws at 1."""
    typed = {name: getattr(options, name) for name in SETTINGS if getattr(options, name) is not None}
    if typed.keys() & FILTERS and not talk.sampling.temperature:
        typed.setdefault("temperature", "1")
    for name, text in typed.items():
        try:
            talk.set(name, text)
        except ValueError as error:
            raise ValueError(f"--{error}") from None


def newest_model() -> Path:
    """The newest model_save/*/best in the current directory or the project. Raises ValueError if there is none."""
    files = "model_save/*/best/*model.safetensors"  # adapter_model.safetensors too
    found = {path for folder in (Path.cwd(), ROOT) for path in folder.glob(files)}
    if not found:
        raise ValueError("no model_save/*/best here: name the model's directory, or train a model first")
    return max(found, key=lambda path: path.stat().st_mtime).parent


def greet(chat: ChatModel, is_told: bool = True) -> None:
    """Print the model and what should be known of it; `is_told` whether to show it the conversation was typed."""
    text = texts_here()
    print(text("chat.greeting", directory=chat.directory, device=chat.model.device))
    if chat.single_turn and not is_told:
        print(text("chat.alone"))
    loss = best_loss(chat.directory.parent / "metrics.jsonl")
    if loss is not None and loss > HARDLY_TRAINED_LOSS:
        print(text("chat.hardly", loss=loss))


def best_loss(journal: Path) -> float | None:
    """Lowest validation loss in the journal of the model's run; None if there is none."""
    try:
        losses = [line["loss"] for line in read_journal(journal) if line["kind"] == "eval" and line.get("loss")]
    except (OSError, ValueError):
        return None
    return min(losses, default=None)


def prepare_streams() -> None:
    """Replace characters that cannot be decoded or encoded, and end the program when the output pipe is closed."""
    sys.stdin.reconfigure(errors="replace")
    sys.stdout.reconfigure(errors="replace")
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)


def read_lines(interactive: bool) -> Iterator[str]:
    """Yield each line until exit or quit, in the terminal those with text. Raises EOFError at the end of the input."""
    while (line := input("> " if interactive else "").strip()).lower() not in ("exit", "quit"):
        if interactive and line.lower() == "cls":
            print(CLEAR_SCREEN, end="", flush=True)
        elif line or not interactive:
            yield line


def respond(talk: Talk, line: str, interactive: bool) -> None:
    """Obey a command or answer a question. A mistake is told and the conversation goes on."""
    if line.startswith("/"):
        return obey(talk, *line[1:].split())
    question, answer = clean_text(line), ""
    try:
        if interactive and question:
            show(talk.ask(question))
        elif question:
            answer = "\n".join(spoken(join_parts(talk.ask(question))))
    except ValueError as error:
        print(printable(str(error)), file=sys.stdout if interactive else sys.stderr)
    if not interactive:
        print(answer.translate(ESCAPES), flush=True)


def spoken(parts: Said) -> list[str]:
    """The text of an answer, if there is any, and a line for each call of a tool."""
    return [*([parts.text] if parts.text or not parts.calls else []), *map(call_line, parts.calls)]


def call_line(text: str) -> str:
    call = json.loads(text)
    arguments = json.dumps(call["arguments"], ensure_ascii=False)
    return printable(texts_here()("chat.call", name=call["name"], arguments=arguments))


def show(answer: Iterator[Said]) -> None:
    """Print an answer while it is generated, its thought dimmed, a call on a line of its own; Ctrl+C ends it."""
    kind = ""  # of what is on the line
    try:
        for part in answer:
            shown = [("thought", f"{DIM}{part.thought}{NOT_DIM}")] if part.thought else []
            shown += [("text", part.text)] if part.text else []
            for now, text in [*shown, *(("call", call_line(call)) for call in part.calls)]:
                print("\n" * (bool(kind) and now != kind or kind == "call") + text, end="", flush=True)
                kind = now
    except KeyboardInterrupt:
        answer.close()
    print(flush=True)


def obey(talk: Talk, command: str = "", *words: str) -> None:
    """Do what a line that begins with / says."""
    try:
        if command == "reset" and not words:
            talk.turns.clear()
            print(texts_here()("chat.reset"))
        elif command == "undo" and not words:
            del talk.turns[-2:]
            print(texts_here()("chat.undone", count=len(talk.turns) // 2))
        elif command == "save" and len(words) == 1:
            save(talk, words[0])
        elif command == "settings" and len(words) in (0, 2):
            if words:
                talk.set(*words)
            if words and words[0] in FILTERS and not talk.sampling.temperature:
                talk.set("temperature", "1")
            print(talk.settings())
        else:
            print(texts_here()("chat.commands"))
    except ValueError as error:
        print(printable(str(error)))


def save(talk: Talk, name: str) -> None:
    """Write the conversation as training data: a line, or one for each question that was asked by itself.

    Raises ValueError if the file is there or cannot be made.
    """
    messages = [message_of(turn, turn.role) for turn in talk.turns]
    size = 2 if talk.single_turn else max(len(messages), 1)
    rows = [messages[start : start + size] for start in range(0, len(messages), size)]
    try:
        with open(name, "x", encoding="utf-8") as file:
            file.writelines(json.dumps(dict(messages=row), ensure_ascii=False) + "\n" for row in rows)
    except FileExistsError:
        raise ValueError(f"{name} is there already: name another file") from None
    except OSError as error:
        raise ValueError(f"{name} cannot be written: {error.strerror}") from None
    print(texts_here()("chat.saved", count=len(messages) // 2, name=name))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
