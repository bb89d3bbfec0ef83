from model.runtime.terminal import printable


def test_what_a_stranger_wrote_is_shown_and_does_nothing_to_the_terminal():
    hostile = "a\x1b[2J\x07\r\n\x9b31m\u202egnp\u2066.\u200f\x7f\udcff"
    assert printable(hostile) == r"a\x1b[2J\x07\r\n\x9b31m\u202egnp\u2066.\u200f\x7f\udcff"
    assert printable("loss 你好\u3000é \\ '😀'") == "loss 你好\u3000é \\ '😀'"
