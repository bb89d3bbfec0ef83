"""A thought at the beginning of an answer's text, between <think> and </think>."""

OPENS, CLOSES = "<think>", "</think>"


def split_thought(text: str) -> tuple[str, str]:
    """(thought, the text behind it); the thought is "" where the text does not begin with one.

    The line breaks around both go, as in Qwen3's template. A text may lack <think>, which some templates write before
    it.
    """
    before, mark, behind = text.partition(CLOSES)
    opened, has_opener, thought = before.partition(OPENS)
    if not mark or has_opener and opened.strip():
        return "", text
    return (thought if has_opener else before).strip("\n"), behind.lstrip("\n")


def with_thought(thought: str, text: str) -> str:
    """The text behind its thought."""
    return f"{OPENS}\n{thought}\n{CLOSES}\n\n{text}" if thought else text
