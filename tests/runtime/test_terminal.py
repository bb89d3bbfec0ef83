from model.runtime.terminal import printable


def test_untrusted_text_is_shown_with_its_control_characters_escaped():
    hostile = "a\x1b[2J\x07\r\n\x9b31m\u202egnp\u2066.\u200f\x7f\udcff"
    assert printable(hostile) == r"a\x1b[2J\x07\r\n\x9b31m\u202egnp\u2066.\u200f\x7f\udcff"
    assert printable("loss 你好\u3000é \\ '😀'") == "loss 你好\u3000é \\ '😀'"


def test_control_and_direction_characters_are_escaped_and_other_text_is_kept():
    text = "a\x1b[2J\x9b1m\r\n\x00\x7f\u202e\u2066\u200f\u2028\ud83d 的😀\\x"
    shown = r"a\x1b[2J\x9b1m\r\n\x00\x7f\u202e\u2066\u200f\u2028\ud83d 的😀\x"
    assert printable(text) == shown
