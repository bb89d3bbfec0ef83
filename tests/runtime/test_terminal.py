import os
import pty
import subprocess
import sys
from pathlib import Path

from model.runtime.terminal import printable


def test_untrusted_text_is_shown_with_its_control_characters_escaped():
    hostile = "a\x1b[2J\x07\r\n\x9b31m\u202egnp\u2066.\u200f\x7f\udcff"
    assert printable(hostile) == r"a\x1b[2J\x07\r\n\x9b31m\u202egnp\u2066.\u200f\x7f\udcff"
    assert printable("loss 你好\u3000é \\ '😀'") == "loss 你好\u3000é \\ '😀'"


def test_control_and_direction_characters_are_escaped_and_other_text_is_kept():
    text = "a\x1b[2J\x9b1m\r\n\x00\x7f\u202e\u2066\u200f\u2028\ud83d 的😀\\x"
    shown = r"a\x1b[2J\x9b1m\r\n\x00\x7f\u202e\u2066\u200f\u2028\ud83d 的😀\x"
    assert printable(text) == shown


LEADER = """
import fcntl, os, sys, termios
from model.runtime.terminal import in_foreground

def places(*moves):
    pid = os.fork()
    if pid == 0:
        for move in moves[:1]:
            move()
        os._exit(places(*moves[1:]) if len(moves) > 1 else in_foreground())
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def stay(): pass
def own_group(): os.setpgid(0, 0)

os.setsid()
fcntl.ioctl(os.open(sys.argv[1], os.O_RDWR), termios.TIOCSCTTY, 0)
print(*(places(*moves) for moves in ([stay], [own_group], [os.setsid], [own_group, os.setsid], [stay, os.setsid])))
"""


def test_a_process_is_in_the_foreground_if_its_group_or_its_launchers_has_the_terminal():
    near, far = pty.openpty()
    command = [sys.executable, "-c", LEADER, os.ttyname(far)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    os.close(near), os.close(far)
    assert done.stdout.split() == ["1", "0", "1", "0", "1"], done.stderr
