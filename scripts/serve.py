"""Serve trained models: OpenAI's HTTP interface, and a page to talk to them.

    python scripts/serve.py MODEL_DIR [MODEL_DIR…] [--run RUN_DIR] [--host 127.0.0.1] [--port 8000] [--api_key KEY]
        [--single_turn]

MODEL_DIR is a Hugging Face directory or a run directory. Of several models a request's `model` chooses one; the page
shows their answers beside each other. It shows the run RUN_DIR too, live while it trains, or those of a folder. With
--single_turn each question is answered by itself, with the system text: the default for a model that was trained on
single questions; --single_turn=False answers with what was said before. Needs the extra packages:
pip install -e '.[serve]'
"""

import argparse
import contextlib
import errno
import os
import signal
import socket
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from model.runtime.cgroup import limit_threads  # noqa: E402
from model.runtime.environment import explain_missing_packages  # noqa: E402

explain_missing_packages()
limit_threads()
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from model.commands.option_names import (  # noqa: E402
    ScriptParser,  # noqa: E402
    true_or_false,
    with_value,
)
from model.display.catalogue import texts_here  # noqa: E402

LOOPBACK = ("127.0.0.1", "localhost", "::1")
MAX_CONNECTIONS = 512
KEEP_ALIVE_SECONDS = 10
BEFORE_ANSWER_SECONDS = 60  # in which a request's body is there


def main(argv: list[str]) -> int:
    options = parse_arguments(argv)
    try:
        check(options)
        return serve(options)
    except ValueError as error:
        from model.runtime.terminal import printable_lines

        print(printable_lines(str(error)), file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if find_spec("torch") is None:  # not only the server's own packages are missing
            raise
        print(f"the package {error.name} is missing: type pip install -e '.[serve]'", file=sys.stderr)
        return 2


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = ScriptParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dirs", type=Path, nargs="+", metavar="MODEL_DIR")
    parser.add_argument("--run", type=Path, help="run directory that the page shows, or a folder of them")
    parser.add_argument("--host", default="127.0.0.1", help="address; another than this machine's needs --api_key")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--api_key", default=os.environ.get("CHAT_API_KEY", ""), help="default: $CHAT_API_KEY")
    parser.add_argument(
        "--single_turn", type=true_or_false, metavar="True|False", help="answer each question by itself"
    )
    parser.add_argument("--slots", type=int, default=0, help="answers at a time; 0: 64 on a GPU, 16 on a CPU")
    parser.add_argument("--max_prompt_tokens", type=int, default=1024)
    parser.add_argument("--max_new_tokens", type=int, default=1024, help="of an answer, at most")
    parser.add_argument("--max_waiting", type=int, default=256, help="requests that may wait for a slot")
    parser.add_argument("--request_seconds", type=float, default=300, help="time limit of an answer")
    return parser.parse_intermixed_args(with_value(argv, "--single_turn"))  # models before and after options


def check(options: argparse.Namespace) -> None:
    """Raise ValueError for options that cannot be served."""
    if options.host not in LOOPBACK and not options.api_key:
        raise ValueError(f"--host={options.host}: others can reach this address, so give --api_key KEY too")
    least = dict(port=0, slots=0, max_prompt_tokens=8, max_new_tokens=1, max_waiting=0, request_seconds=1)
    for name, value in least.items():
        if getattr(options, name) < value:
            raise ValueError(f"--{name}={getattr(options, name)}: must be at least {value}")
    if options.port > 65535:
        raise ValueError(f"--port={options.port}: must be at most 65535")
    if options.run and not options.run.is_dir():
        raise ValueError(
            f"--run={options.run}: no such directory; name a run directory, for example model_save/sft_fast"
        )


def bound(host: str, port: int) -> list[socket.socket]:
    """Sockets that hold `port` at the addresses of `host`. Raises OSError if they are not to be had."""
    sockets, absent = [], None
    with contextlib.ExitStack() as opened:
        for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            try:
                sock = opened.enter_context(socket.socket(family, kind, protocol))
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, os.name == "posix")
                if family == socket.AF_INET6:
                    sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                sock.bind(address)
                sockets.append(sock)
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
                absent = error  # localhost may have an IPv6 address where the machine has none
        if not sockets:
            raise absent
        opened.pop_all()
    return sockets


def listeners(host: str, port: int) -> list[socket.socket]:
    """`bound`, with a ValueError that says what to type instead."""
    try:
        return bound(host, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ValueError(f"--port={port} is in use: type another, or --port=0 for any that is free") from None
        if error.errno == errno.EACCES:
            raise ValueError(f"--port={port} is not for users: type --port=8000") from None
        raise ValueError(f"--host={host}: no address of this machine ({error.strerror}): leave it out") from None


def serve(options: argparse.Namespace) -> int:
    import uvicorn  # before the model is loaded, which takes seconds

    from model.serve.answering import load_chat_model
    from model.serve.connection import WatchedConnection
    from model.serve.server import make_app

    connection = partial(WatchedConnection, answer_seconds=options.request_seconds + BEFORE_ANSWER_SECONDS)
    sockets = listeners(options.host, options.port)  # before the model is loaded, too
    chats = [load_chat_model(directory) for directory in options.model_dirs]
    port = sockets[0].getsockname()[1]  # one that was free, if 0 was asked for
    address = f"http://{options.host}:{port}"
    app = make_app(site_of(chats, options))
    for chat in chats:
        ready = dict(directory=chat.directory, device=chat.model.device, address=address)
        print(texts_here()("serve.ready", **ready), flush=True)
        if chat.single_turn and options.single_turn is None:
            print(texts_here()("serve.alone"), flush=True)
    server = uvicorn.Server(uvicorn.Config(
        app, log_level="warning", limit_concurrency=MAX_CONNECTIONS, http=connection,
        access_log=False, timeout_keep_alive=KEEP_ALIVE_SECONDS, timeout_graceful_shutdown=5,
    ))  # fmt: skip
    server.run(sockets)
    return 0 if server.started else 1


def site_of(chats, options: argparse.Namespace):
    from model.serve.run_panel import RunPanel
    from model.serve.server import Site
    from model.serve.server_metrics import ServerMetrics
    from model.serve.service import names_of

    names, metrics = names_of([chat.directory for chat in chats]), ServerMetrics()
    hosts = ("*",) if options.host not in LOOPBACK else ("localhost", "127.0.0.1", "[::1]", "::1")
    services = tuple(service_of(chat, name, metrics, options) for chat, name in zip(chats, names, strict=True))
    return Site(services, options.api_key, RunPanel(options.run) if options.run else None, hosts)


def service_of(chat, name, metrics, options: argparse.Namespace):
    from model.serve.decoding_thread import DecodingThread
    from model.serve.service import Service

    slots = options.slots or (64 if chat.model.device.type == "cuda" else 16)
    limits = chat.limits(slots, options.max_prompt_tokens, options.max_new_tokens)
    return Service(
        chat, DecodingThread(chat.model, limits, options.max_waiting), name,
        input_tokens=options.max_prompt_tokens, new_tokens=options.max_new_tokens,
        request_seconds=options.request_seconds, metrics=metrics,
        single_turn=chat.single_turn if options.single_turn is None else options.single_turn,
    )  # fmt: skip


if __name__ == "__main__":
    # Ctrl+C while libraries are imported, which swallow a KeyboardInterrupt; and once more when the server has ended
    signal.signal(signal.SIGINT, lambda *_: os._exit(0))
    sys.exit(main(sys.argv[1:]))
