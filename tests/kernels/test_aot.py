"""What libtpu's compiler says of the TPU forms; skipped where it is not installed (make aot installs it)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("libtpu")

ROOT = Path(__file__).parents[2]

# Compiling for TPUs sets up the process, so it has one of its own.
PROGRAM = """
import json, sys
import jax
from experiments import aot
aot.prepare()
from experiments.kernel_cases.windowed_gating import _case
made = [
    row
    for call in json.loads(sys.argv[1])
    for row in aot.rows(_case(*call), ["v5e"], plain=False)
]
print(json.dumps(made))
"""


def compiled(*calls):
    run = subprocess.run([sys.executable, "-c", PROGRAM, json.dumps(calls)], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.slow
def test_bytes_on_v5e_are_near_the_least():
    calls = [(8, 4, 1, "vector", 8192, 8, 128, "bfloat16"), (8, 4, 2, "vector", 8192, 8, 128, "bfloat16")]
    calls.append((16, 16, 1, "vector", 8192, 8, 128, "bfloat16"))
    made = compiled(*calls)
    assert len(made) == 6
    for row in made:
        limit = 1.3 if row["pass"] == "forward" else 1.6
        assert row["bytes_least"] <= row["bytes"] <= limit * row["bytes_least"], row


@pytest.mark.slow
def test_any_length_compiles_within_the_memory_of_the_chip():
    for_lengths = [(8, 4, 1, "vector", length, 1, 128, "bfloat16") for length in (128, 1000, 131_072)]
    made = compiled(
        *for_lengths,
        (8, 8, 1, "scalar", 131_072, 1, 128, "bfloat16"),
        (128, 128, 1, "vector", 131_072, 1, 128, "float32"),
    )
    assert all(0 < row["vmem"] <= 16 * 2**20 for row in made), made
