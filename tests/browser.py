"""A real browser on the page of a server, and what people do with it."""

import json
import os
import shutil

import pytest

from tests.served import wait_until

needs_chromium = pytest.mark.skipif(
    shutil.which("chromium") is None and not os.environ.get("CI"), reason="no chromium: apt-get install chromium-driver"
)
WORDS = "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --window-size=1500,900".split()


def new_browser():
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for word in WORDS:
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    return webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))


class Page:
    """The page of the server at `address` in `browser`; a fresh one, which remembers nothing."""

    def __init__(self, browser, address):
        self.browser, self.address = browser, address
        browser.get(address)
        self.run("saveTalk = noteRunning = () => {}; localStorage.clear(); sessionStorage.clear();")
        browser.get(address)

    def run(self, code, *values):
        return self.browser.execute_script(code, *values)

    def find(self, selector):
        return self.browser.find_element("css selector", selector)

    def texts(self, selector):
        return self.run("return [...document.querySelectorAll(arguments[0])].map(e => e.textContent)", selector)

    def click(self, selector):
        self.find(selector).click()

    def type(self, *keys, at="#question"):
        self.find(at).send_keys(*keys)

    def ask(self, text):
        self.type(text, "\ue007")

    def expect(self, selector, texts):
        """Wait until the elements have these texts."""
        try:
            wait_until(lambda: self.texts(selector) == texts)
        except AssertionError:
            raise AssertionError(f"{selector}: {self.texts(selector)} instead of {texts}") from None

    def wait_for(self, selector, count=1):
        """Wait until so many elements of a selector are shown."""
        shown = "return [...document.querySelectorAll(arguments[0])].filter(e => e.checkVisibility()).length"
        wait_until(lambda: self.run(shown, selector) == count)

    def set(self, **values):
        """Type these settings; a value of an option of a select chooses it."""
        self.click("#openSettings")
        for name, value in values.items():
            field = self.find(f"#option_{name}")
            if field.tag_name != "select":
                field.clear()
            field.send_keys(str(value))
        self.click("dialog .buttons .main")

    def choose(self, selector, value):
        code = "const e = document.querySelector(arguments[0]); e.value = arguments[1];"
        self.run(code + "e.dispatchEvent(new Event('input'))", selector, value)

    def reload(self):
        self.browser.refresh()

    def errors(self):
        return [entry for entry in self.browser.get_log("browser") if entry["level"] == "SEVERE"]

    def hosts(self):
        """The addresses that the page asked for since the last call."""
        events = [json.loads(entry["message"])["message"]["params"] for entry in self.browser.get_log("performance")]
        return {event["request"]["url"] for event in events if "url" in event.get("request", {})}
