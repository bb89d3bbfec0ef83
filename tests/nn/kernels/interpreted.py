"""The kernels in Triton's interpreter on the CPU, in one child process for the tests of all kernels but attention."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
CODE = """
import json, os, torch
from tests.nn.kernels import test_adamw, test_cross_entropy, test_decode_attention, test_dropout, test_muon, test_nf4
from tests.nn.kernels import test_gate, test_guided_cross_entropy, test_lora, test_norm, test_rotary, test_rounding
modules = test_norm, test_cross_entropy, test_adamw, test_dropout, test_rotary, test_muon, test_nf4
modules += test_decode_attention, test_gate, test_lora, test_guided_cross_entropy, test_rounding
torch.manual_seed(int.from_bytes(os.urandom(4), "little"))
print(json.dumps({module.__name__: module.interpreted() for module in modules}))
"""


def relative_error(ours, reference):
    return ((ours.double() - reference.double()).norm() / reference.double().norm()).item()


@cache
def interpreted_errors():
    """{name of a test module: relative errors that its `interpreted` gives}."""
    # A child process, because Triton reads TRITON_INTERPRET when a kernel is defined.
    environ = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", CODE], cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
