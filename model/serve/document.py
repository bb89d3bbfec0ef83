"""The page as one document that needs nothing from elsewhere, and the headers that forbid anything else in it."""

import base64
import hashlib
import json
import re
from pathlib import Path

from model.display.catalogue import CATALOGUE

FOLDER = Path(__file__).with_name("page")
PLACE = re.compile(r"\{\{([\w.]+)\}\}")  # where page.html has the text of another file, or the values
SCRIPT, STYLE = (re.compile(rf"<{tag}>(.*?)</{tag}>", re.DOTALL) for tag in ("script", "style"))


def document(models: list[dict], needs_key: bool, has_runs: bool) -> str:
    """The page's HTML, for these entries of /v1/models, with its words in every language."""
    words = {
        language: {key.removeprefix("page."): text for key, text in texts.items() if key.startswith("page.")}
        for language, texts in CATALOGUE.items()
    }
    values = dict(words=words, models=models, needsKey=needs_key, hasRuns=has_runs)
    json_text = json.dumps(values).replace("<", "\\u003c")  # no text of it ends its element

    def put(place):
        name = place[1]
        return json_text if name == "SETTINGS" else (FOLDER / name).read_text(encoding="utf-8")

    return PLACE.sub(put, (FOLDER / "page.html").read_text(encoding="utf-8"))


def headers(html: str) -> dict[str, str]:
    """HTTP headers of a document: only its own scripts and styles count, and it talks to its own server alone."""
    scripts, styles = (" ".join(map(_digest, pattern.findall(html))) for pattern in (SCRIPT, STYLE))
    policy = (
        f"default-src 'none'; style-src {styles}; script-src {scripts}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return {"content-security-policy": policy, "x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}


def _digest(text):
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
