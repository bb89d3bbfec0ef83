"""A server of two models that know a few answers by heart, and its page in a real browser."""

import json
import signal
from types import SimpleNamespace

import pytest

from tests.browser import Page, new_browser
from tests.knowing import CALLING, MARKED, PAIRS, write_knowing_model
from tests.ranks import free_port
from tests.served import START_SECONDS, can_connect, started, wait_until, write_journal

OTHER = {"hello": "hello you"}


@pytest.fixture(scope="package")
def home(tmp_path_factory):
    """A folder with two models of single questions, and the journal of one of them."""
    folder = tmp_path_factory.mktemp("home")
    for name, pairs in (("known", PAIRS | CALLING | MARKED), ("other", OTHER | dict(list(PAIRS.items())[:1]))):
        write_knowing_model(folder / name / "best", pairs)
        settings = dict(chat_trainer=dict(single_turn=True), max_new_tokens=200)
        (folder / name / "best" / "generation_config.json").write_text(json.dumps(settings))
    write_journal(folder / "known", 60)
    return folder


@pytest.fixture(scope="package")
def served(home):
    """The server's address, with functions that start and end it."""
    port, state = free_port(), SimpleNamespace()
    words = [home / "known", home / "other", "--run", home / "known", "--port", port, "--max_new_tokens", 4000]

    def start():
        state.process = started([*map(str, words)])
        wait_until(lambda: can_connect(port), START_SECONDS)

    def end():
        state.process.send_signal(signal.SIGTERM)
        assert state.process.wait(30) in (0, -signal.SIGTERM)

    def kill():
        state.process.kill()
        state.process.wait()

    start()
    yield SimpleNamespace(address=f"http://127.0.0.1:{port}", start=start, kill=kill)
    end()


@pytest.fixture(scope="package")
def browser():
    browser = new_browser()
    yield browser
    browser.quit()


@pytest.fixture
def page(served, browser):
    """A fresh page that asks the model `known`, and no other host; it ends with no error in the browser's console."""
    page = Page(browser, served.address)
    page.hosts(), page.errors()
    page.choose("#models", "known")
    yield page
    assert not page.errors()
    assert all(url.startswith((served.address, "data:", "about:")) for url in page.hosts())
