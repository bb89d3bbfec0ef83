"""The conversations that the server's page keeps in the browser."""

import json

from tests.browser import needs_chromium
from tests.knowing import PAIRS
from tests.served import REPEATS, open_requests, wait_until

pytestmark = needs_chromium
ESCAPE = "\ue00c"
UP = "\ue013"
ENDLESS = dict(max_tokens=4000, **REPEATS)


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
    wait_until(lambda: open_requests([served.address]) == 0)


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
