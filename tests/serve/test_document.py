"""The page is one document that needs nothing else, and its Markdown makes elements of marks alone."""

import base64
import hashlib
import re

import pytest

from model.serve.document import FOLDER, document, headers
from tests.browser import Page, needs_chromium, new_browser
from tests.served import wait_until

NUMBERS = re.findall(r'"(\w+)"', re.search(r"NUMBERS = \[(.*?)\]", (FOLDER / "settings.js").read_text())[1])
MODEL = dict(id="</script><b>m", single_turn=False, defaults={}, limits={})


def test_the_document_holds_all_of_its_files_and_only_its_own_scripts_may_run():
    html = document([MODEL], needs_key=True, has_runs=False)
    for path in FOLDER.iterdir():
        text = path.read_text(encoding="utf-8")
        assert path.name == "page.html" or (text in html and len(text.splitlines()) <= 300), path
        assert path.name == "page.html" or "</" + "script" not in text and "innerHTML" not in text, path
    assert "{{" not in html and html.count("</" + "script>") == html.count("<script")
    assert re.findall(r"<(?:link|img|script|style) [^>]*>", html) == [
        '<link rel="icon" href="data:,">', '<script type="application/json" id="served">'
    ]  # fmt: skip
    policy = headers(html)["content-security-policy"]
    scripts = re.findall("<script>(.*?)</script>", html, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts]
    assert digests and all(f"'sha256-{digest}'" in policy for digest in digests) and "unsafe" not in policy


@pytest.fixture
def page(tmp_path):
    """The document from a file, without a server."""
    limits = {name: (0, 1) for name in NUMBERS}
    (tmp_path / "page.html").write_text(document([MODEL | dict(limits=limits)], True, False), encoding="utf-8")
    browser = new_browser()
    yield Page(browser, f"file://{tmp_path}/page.html")
    browser.quit()


@needs_chromium
def test_markdown_of_every_kind_becomes_elements_and_no_text_takes_long(page):
    shown = "const box = made('div', {}, ...markdown(arguments[0])); return box.innerHTML"
    for text, expected in {
        "a\nb\n\nc": "<p>a\nb</p><p>c</p>",
        "3. a\n   - b\n4. c\n\nd": '<ol start="3"><li><p>a</p><ul><li><p>b</p></li></ul></li><li><p>c</p></li></ol>'
        "<p>d</p>",
        "> *a*\n\n---": "<blockquote><p><em>a</em></p></blockquote><hr>",
        "|a|b|\n|-|-:|\n|1|~~2~~|": '<div class="wide"><table><thead><tr><th class="left">a</th>'
        '<th class="right">b</th></tr></thead><tbody><tr><td class="left">1</td><td class="right"><del>2</del></td>'
        "</tr></tbody></table></div>",
        "snake_case_name 2*3*4 \\*x\\* ``a`b``": "<p>snake_case_name 2*3*4 *x* <code>a`b</code></p>",
        "**粗***斜*": "<p><strong>粗</strong><em>斜</em></p>",
        "[a](data:text/html,x) [b](//e.org) <a href=x>": "<p>[a](data:text/html,x) [b](//e.org) &lt;a href=x&gt;</p>",
    }.items():
        assert page.run(shown, text) == expected
    address = page.run(shown, "见https://e.org/a?b=1。")
    assert 'href="https://e.org/a?b=1"' in address and "</a>。" in address
    unclosed = page.run(shown, "```\n**a")
    assert '<pre tabindex="0"><code>**a</code></pre>' in unclosed, "a block that is still being written"
    timed = (
        "const started = performance.now(); markdown(arguments[0].repeat(20000)); return performance.now() - started"
    )
    for piece in ("*a ", "[", "`a", "> ", "- ", "![a](", "_*~", "|-", "    ", "\n\n", "1. a\n", "https://"):
        assert page.run(timed, piece) < 3000, piece


@needs_chromium
def test_each_refusal_says_what_to_do(page):
    answer = "Response.json({ error: { message: 'why' } }, { status: window.answered })"
    page.run(f"window.fetch = async () => {answer}")
    for status, said in {
        429: "The server is busy: ask again in a moment.",
        413: "The conversation is too long: start a new one.",
        404: "The server does not have this: why. Load the page anew.",
        503: "The server cannot answer at present: why",
        400: "Refused: why",
        401: "The API key is missing or wrong: type it in the settings.Settings",
    }.items():
        page.run("window.answered = arguments[0]", status)
        page.ask("hello")
        wait_until(lambda said=said: page.texts(".problem")[-1:] == [said])
    page.click(".round:last-child .problem button")
    assert page.run("return document.activeElement.id") == "option_key"
