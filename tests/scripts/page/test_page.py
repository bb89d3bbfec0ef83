"""The server's page in a real browser: what it shows of answers, of models and of settings."""

import json

import openai
import pytest

from tests.browser import needs_chromium
from tests.knowing import MARKED, PAIRS
from tests.served import REPEATS, client_of, messages, open_requests, wait_until

pytestmark = needs_chromium
OTHER = "hello you"  # what the second model says to hello
ESCAPE = "\ue00c"
ENDLESS = dict(max_tokens=4000, **REPEATS)


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
    wait_until(lambda: open_requests([served.address]) == 0)
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
    wait_until(lambda: open_requests([served.address]) == 0 and page.run("return !running.size"))
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
    page.expect(".body", [PAIRS["hello"], OTHER])
    assert page.texts(".assistant h2") == ["known", "other"]
    left, right = (page.find(f".assistant:nth-child({place})").rect for place in (1, 2))
    assert left["y"] == right["y"] and left["x"] + left["width"] < right["x"]
    page.choose("#models", "other")
    page.ask("hello")
    page.expect(".body", [PAIRS["hello"], OTHER, OTHER])
    page.wait_for(".assistant h2", 3)  # also of an answer by itself, as another could have given it
    client = client_of([served.address])
    models = {model.id: model for model in client.models.list()}
    assert models.keys() == {"known", "other"} and models["other"].defaults["max_tokens"] == 200
    said = client.chat.completions.create(model="other", messages=messages("hello"))
    assert (said.model, said.choices[0].message.content) == ("other", OTHER)
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
        page.expect(".body", [PAIRS["hello"], OTHER])
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
        page.expect(".body", [PAIRS["hello"], OTHER])
        page.click("#openTalks")
        page.click("#list .title")
        page.wait_for("nav", 0)
        assert page.run("return document.documentElement.scrollWidth") <= 390
    finally:
        page.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        page.browser.execute_cdp_cmd("Emulation.setUserAgentOverride", dict(userAgent="", acceptLanguage="en"))
