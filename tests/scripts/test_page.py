"""The server's page in a real browser, with two models that know a few answers by heart."""

import json
import signal
from types import SimpleNamespace

import openai
import pytest

from tests.browser import Page, needs_chromium, new_browser
from tests.knowing import CALLING, PAIRS, write_knowing_model
from tests.ranks import free_port
from tests.served import (
    REPEATS,
    START_SECONDS,
    can_connect,
    client_of,
    messages,
    open_requests,
    started,
    wait_until,
    write_journal,
)

pytestmark = needs_chromium
MARKED = {
    "md": "### 好\n**天** `x`\n\n```python\ndef f():\n    1\n```\n[a](https://e.org)",
    "evil": '<img src=x onerror="f()"> <b>好</b> [a](javascript:f) ![b](https://e.org/b.png)',
}
OTHER = {"hello": "hello you"}
ESCAPE, UP = "\ue00c", "\ue013"
ENDLESS = dict(max_tokens=4000, **REPEATS)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with two models of single questions, and the journal of one of them."""
    folder = tmp_path_factory.mktemp("home")
    for name, pairs in (("known", PAIRS | CALLING | MARKED), ("other", OTHER | dict(list(PAIRS.items())[:1]))):
        write_knowing_model(folder / name / "best", pairs)
        settings = dict(chat_trainer=dict(single_turn=True), max_new_tokens=200)
        (folder / name / "best" / "generation_config.json").write_text(json.dumps(settings))
    write_journal(folder / "known", 60)
    return folder


@pytest.fixture(scope="module")
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


@pytest.fixture(scope="module")
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


def num_open(served):
    return open_requests([served.address])


def test_an_answer_streams_is_stopped_and_answered_again(page, served):
    page.ask("hello")
    page.expect(".body", [PAIRS["hello"]])
    wait_until(lambda: "tokens/s (" in page.texts(".assistant .figures")[0])
    page.click(".again")
    page.expect(".problem", ["The same again: at temperature 0 it is always the likeliest. Raise it in the settings."])
    page.set(**ENDLESS)
    page.ask("hello")
    seen = set()
    wait_until(lambda: seen.add(len(page.texts(".body")[-1])) or len(seen) > 3)  # the answer grows
    page.click("#stop")
    wait_until(lambda: num_open(served) == 0)
    wait_until(lambda: page.texts(".problem")[-1].startswith("Stopped."))
    page.set(max_tokens=3)
    page.click(".round:last-child .again")
    wait_until(lambda: page.texts(".problem")[-1].startswith("Cut at 3 tokens"))
    assert len(page.texts(".body")) == 2
    page.run("document.querySelector('.round').isFirst = true")
    page.ask("hello")
    wait_until(lambda: [text[:7] for text in page.texts(".problem")[1:]] == ["Cut at "] * 2)
    assert page.run("return document.querySelector('.round').isFirst"), "what was said long before is not drawn again"
    assert page.run("return [...document.querySelectorAll('.again')].map(e => e.hidden)") == [True, True, False]


def test_conversations_are_listed_renamed_deleted_and_survive_a_refresh(page):
    page.ask("hello")
    page.expect(".body", [PAIRS["hello"]])
    page.type("half a quest")
    page.reload()
    page.expect(".body", [PAIRS["hello"]])
    assert page.find("#question").get_attribute("value") == "half a quest"
    page.find("#question").clear()
    page.click("#new")
    page.ask("请说一个字")
    page.expect("#list .title", ["请说一个字", "hello"])
    page.click("#list li:last-child .title")
    page.expect(".user .text", ["hello"])
    page.click("#list li:last-child .rename")
    page.type("<b>greeting</b>\ue007", at="#list input")
    page.expect("#list .title", ["请说一个字", "<b>greeting</b>"])
    assert page.run("return document.activeElement.textContent") == "<b>greeting</b>", "the keyboard goes on there"
    page.reload()
    page.expect("#list .title", ["请说一个字", "<b>greeting</b>"])
    page.click("#list li:last-child .title")
    page.click("#list li:last-child .remove")
    page.expect("#list .title", ["请说一个字"])
    page.click("#notice button")  # it takes that back
    page.expect("#list .title", ["<b>greeting</b>", "请说一个字"])
    page.type("\ue007", at="#list li:last-child .remove")
    page.expect("#list .title", ["<b>greeting</b>"])
    page.type("\ue007", at=":focus")  # by keyboard too, as soon as it is deleted
    page.expect("#list .title", ["请说一个字", "<b>greeting</b>"])
    page.click("#list li:last-child .title")
    page.ask("hello")
    page.expect("#list .title", ["<b>greeting</b>", "请说一个字"])
    page.click("#list li:first-child .remove")
    page.reload()
    page.expect("#list .title", ["请说一个字"])


def test_an_answer_goes_on_after_a_refresh_in_its_middle_and_is_cut_where_its_page_was_closed(page, served):
    page.set(**ENDLESS, temperature=1)
    page.ask("hello")
    wait_until(lambda: len(page.texts(".body")[0]) > 40)
    before = page.texts(".body")[0]
    page.reload()
    assert page.texts(".body")[0].startswith(before), "what was there stays until it is said again"
    wait_until(lambda: len(page.texts(".body")[0]) > len(before) + 40)
    assert page.texts(".body")[0].startswith(before), "the same seed gives the same answer"
    page.run("sessionStorage.clear(); noteRunning = () => {}")  # as in a new tab
    page.reload()
    page.wait_for(".problem")
    assert "cut off" in page.texts(".problem")[0] and len(page.texts(".body")[0]) > 40
    wait_until(lambda: num_open(served) == 0)


def test_two_tabs_answer_in_one_conversation_and_neither_loses_what_the_other_asked(page, served):
    page.set(**ENDLESS, temperature=1)
    page.ask("hello")
    wait_until(lambda: len(page.texts(".body")[0]) > 20)
    first = page.browser.current_window_handle
    page.browser.switch_to.new_window("window")
    try:
        page.browser.get(served.address)
        page.choose("#models", "known")
        page.expect(".figures", ["answering …"])
        page.ask("请说一个字")
        wait_until(lambda: [len(text) > 60 for text in page.texts(".body")] == [True, True])
        page.click("#stop")
        page.expect(".problem", ["", "Stopped."])
        page.browser.switch_to.window(first)
        page.expect(".problem", ["", "Stopped."])
        page.click("#stop")
        page.expect(".problem", ["Stopped.", "Stopped."])
        page.reload()
        page.expect(".user .text", ["hello", "请说一个字"])
    finally:
        for handle in page.browser.window_handles:
            page.browser.switch_to.window(handle)
            if handle != first:
                page.browser.close()
        page.browser.switch_to.window(first)


def test_an_answer_s_markdown_is_shown_and_its_code_copied(page):
    page.ask("md")
    page.wait_for(".body a")
    assert [page.texts(f".body {one}")[0] for one in ("h5", "strong", "p code", "pre")] == [
        "好", "天", "x", "def f():\n    1"
    ]  # fmt: skip
    assert page.find(".body a").get_attribute("href") == "https://e.org/"
    page.run("window.text = ''; navigator.clipboard.writeText = async (text) => { window.text = text; }")
    page.click(".body .copy")
    wait_until(lambda: page.run("return window.text") == "def f():\n    1")
    page.click(".copy_all")
    wait_until(lambda: page.run("return window.text") == MARKED["md"])


def test_a_hostile_answer_stays_text(page):
    page.ask("evil")
    page.expect(".body", ['<img src=x onerror="f()"> <b>好</b> [a](javascript:f) b'])
    names = page.run("return [...document.querySelectorAll('.body *')].map(e => e.tagName)")
    assert names == ["P", "A"] and page.find(".body a").get_attribute("href") == "https://e.org/b.png"
    page.click(".edit_it")
    page.type(" <i>x</i>\ue007", at=".edit textarea")
    page.expect(".user .text", ["evil <i>x</i>"])
    slow = "const began = performance.now(); markdown(arguments[0]); return performance.now() - began;"
    for text in ("- " + " " * 50_000 + "a\u2028b", "# " + " " * 50_000 + "a\u2028b", "**a " * 50_000):
        assert page.run(slow, text) < 1500, "no pattern goes back over a line for each of its characters"


def test_what_another_page_of_this_address_has_kept_leaves_the_page_usable(page):
    kept = "localStorage.setItem(arguments[0], arguments[1])"
    for number, reply in enumerate(
        [None, "x", {}, dict(content=1), dict(content="", tool_calls=[{}]), dict(content="", tokens=1, seconds="x")]
    ):
        rounds = [dict(question="hello", answers=dict(known=reply))]
        page.run(kept, f"talk:{number}", json.dumps(dict(id=str(number), rounds=rounds)))
    page.run(kept, "talk:whole", json.dumps(dict(id="whole", rounds=[dict(question="kept", answers={})])))
    for settings in ('"dark"', '{"language": 7}', '{"language": "constructor"}'):
        page.run(kept + "; sessionStorage.setItem('answering', '5')", "settings", settings)
        page.reload()
        page.expect("#list .title", ["kept"])
    page.set(max_tokens=3)


def test_a_question_is_edited_and_sent_again_by_keyboard(page):
    page.ask("hello")
    page.expect(".body", [PAIRS["hello"]])
    page.ask("想")
    page.wait_for(".thought", 1)
    thought = page.find(".round:last-child .thought")
    assert thought.get_attribute("open") is None and page.texts(".thought .text")[1] == "你"
    page.expect(".calls code", ['calls f {"x": "天"}'])
    page.type(UP)
    page.type(ESCAPE, at=".edit textarea")
    page.expect(".user .text", ["hello", "想"])
    page.click(".round:first-child .edit_it")
    page.find(".edit textarea").clear()
    page.type("请说一个字\ue007", at=".edit textarea")
    page.expect(".user .text", ["请说一个字"])
    page.expect(".body", [PAIRS["请说一个字"]])
    page.set(**ENDLESS)
    page.ask("hello")
    page.wait_for("#stop")
    page.type(ESCAPE)
    wait_until(lambda: page.texts(".problem")[-1].startswith("Stopped."))
    page.type("\ue00an")  # Alt+N
    page.expect(".round", [])


def test_settings_show_what_is_in_force_and_take_only_what_the_server_takes(page, served):
    page.run(
        "const was = fetch; window.sent = [];"
        "window.fetch = (url, more) => { sent.push(more?.body); return was(url, more); }"
    )
    shown = [page.find(f"#option_{name}").get_attribute("placeholder") for name in ("max_tokens", "top_p", "seed")]
    assert shown == ["200", "1", "random"]
    assert page.find("#option_earlier").get_attribute("value") == "0", "the models know single questions"
    assert "single questions" in page.texts("label:has(#option_earlier) small")[0]
    page.set(temperature=1000, max_tokens=5000)
    assert page.texts("label.wrong small") == ["not used: must be from 0 to 100", "not used: must be from 1 to 4,000"]
    page.set(temperature=0.5, max_tokens=9, system="be brief", seed=7)
    page.ask("hello")
    wait_until(lambda: num_open(served) == 0 and page.run("return !running.size"))
    body = json.loads(page.run("return sent.filter(Boolean)[0]"))
    assert body["messages"] == [dict(role="system", content="be brief"), dict(role="user", content="hello")]
    assert [body[name] for name in ("temperature", "max_tokens", "seed", "model")] == [0.5, 9, 7, "known"]
    assert "top_p" not in body
    page.click("#openSettings")
    page.click("#resetSettings")
    assert page.find("#option_temperature").get_attribute("value") == ""


def test_two_models_answer_one_question_beside_each_other(page, served):
    page.choose("#models", "")
    page.ask("hello")
    page.expect(".body", [PAIRS["hello"], OTHER["hello"]])
    assert page.texts(".assistant h2") == ["known", "other"]
    left, right = (page.find(f".assistant:nth-child({place})").rect for place in (1, 2))
    assert left["y"] == right["y"] and left["x"] + left["width"] < right["x"]
    page.choose("#models", "other")
    page.ask("hello")
    page.expect(".body", [PAIRS["hello"], OTHER["hello"], OTHER["hello"]])
    page.wait_for(".assistant h2", 3)  # also of an answer by itself, as another could have given it
    client = client_of([served.address])
    models = {model.id: model for model in client.models.list()}
    assert models.keys() == {"known", "other"} and models["other"].defaults["max_tokens"] == 200
    said = client.chat.completions.create(model="other", messages=messages("hello"))
    assert (said.model, said.choices[0].message.content) == ("other", OTHER["hello"])
    with pytest.raises(openai.NotFoundError, match="the models here are known, other"):
        client.chat.completions.create(model="third", messages=messages("hello"))


def test_a_phone_that_speaks_chinese_gets_a_chinese_page_that_fits(page):
    phone = dict(width=390, height=780, deviceScaleFactor=1, mobile=True)
    page.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
    agent = dict(userAgent="phone", acceptLanguage="zh-CN,en")
    page.browser.execute_cdp_cmd("Emulation.setUserAgentOverride", agent)
    try:
        page.reload()
        page.choose("#models", "")
        assert page.texts("#send") == ["发送"] and page.run("return document.documentElement.lang") == "zh"
        last = page.find("#openSettings").rect
        assert last["x"] + last["width"] > 370, "the head is as wide as the page"
        page.ask("hello")
        page.expect(".body", [PAIRS["hello"], OTHER["hello"]])
        first, second = (page.find(f".assistant:nth-child({place})").rect for place in (1, 2))
        assert first["x"] == second["x"] and first["y"] + first["height"] <= second["y"], "one below the other"
        page.click("#openRun")
        page.wait_for("#figures")
        assert page.texts("#figures dt")[0] == "训练损失"
        page.type(ESCAPE)
        page.wait_for("#figures", 0)
        page.click("#openTalks")
        page.click("#list .remove")
        page.click("#notice button")  # beside the list, which is over all else
        page.expect(".body", [PAIRS["hello"], OTHER["hello"]])
        page.click("#openTalks")
        page.click("#list .title")
        page.wait_for("nav", 0)
        assert page.run("return document.documentElement.scrollWidth") <= 390
    finally:
        page.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        page.browser.execute_cdp_cmd("Emulation.setUserAgentOverride", dict(userAgent="", acceptLanguage="en"))


def test_what_goes_wrong_is_said_with_what_to_do_and_nothing_is_lost(page, served):
    page.run("Storage.prototype.setItem = () => { throw new DOMException('full', 'QuotaExceededError'); }")
    page.ask("hello")
    wait_until(lambda: "storage is full" in page.texts("#notice")[0])  # it is hidden after a while
    page.expect(".body", [PAIRS["hello"]])
    page.reload()
    page.choose("#models", "known")
    page.ask("字" * 5000)
    wait_until(lambda: "shorten it" in page.texts(".problem")[-1])
    page.set(**ENDLESS)
    page.ask("hello")
    wait_until(lambda: len(page.texts(".body")[-1]) > 20)
    served.kill()  # asked to end, it would go on with the answer for seconds, in which that may be complete
    page.wait_for(".failed", 2)
    assert "Ask again once it answers" in page.texts(".problem")[-1] and "scripts/serve.py" in page.texts("#notice")[0]
    assert len(page.texts(".body")[-1]) > 20
    served.start()
    wait_until(lambda: page.texts("#notice") == ["The server answers again."])
    page.set(max_tokens=3)
    page.click(".round:last-child .again")
    page.wait_for(".failed", 1)
    page.errors()  # the browser's own words about what was asked while no server was there
