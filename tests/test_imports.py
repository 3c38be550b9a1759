"""What imports what: the directions of the house, read from the source; and a package that costs nothing to import."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = {"jax", "jaxlib", "flax", "optax", "orbax", "numpy", "scipy", "statsmodels", "matplotlib", "rich", "absl"}


@functools.cache
def imported(path):
    """Every dotted name that a file imports anywhere, deferred imports too; `from a import b` gives a and a.b."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def offences(folder, forbidden):
    """`file imports name` for each import under a folder, or of a file, that lies under a forbidden package."""
    place = ROOT / folder
    files = sorted(place.rglob("*.py")) if place.is_dir() else [place]
    assert files
    return [
        f"{file.relative_to(ROOT)} imports {name}"
        for file in files
        for name in sorted(imported(file))
        if any(name == package or name.startswith(f"{package}.") for package in forbidden)
    ]


def test_importing_the_package_imports_nothing_heavy():
    code = "import sys, phase_jax; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    loaded = set(run.stdout.split())
    assert "phase_jax" in loaded
    assert not loaded & HEAVY


def test_the_command_prints_its_help_without_importing_jax():
    code = "import sys; from experiments.cli import main; main(['--help']); print('jax' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert run.stdout.splitlines()[-1] == "False"


PARTS = ("model", "compressors", "data", "training", "evaluation", "statistics", "interventions", "reports")
ABOVE_ALL = ("experiments", "configs", "tests")


def others(*allowed):
    """The rooms of phase_jax but for those."""
    return tuple(f"phase_jax.{part}" for part in PARTS if part not in allowed)


@pytest.mark.parametrize(
    ("folder", "forbidden"),
    [
        ("phase_jax", ABOVE_ALL),
        ("pallas_kernels", ABOVE_ALL),
        ("configs", ("experiments", "tests")),
        ("phase_jax/statistics", ("jax", "flax", "optax", "orbax", "pallas_kernels", *others("statistics"))),
        ("phase_jax/reports", ("jax", "flax", "pallas_kernels", *others("reports", "statistics"))),
        ("phase_jax/data", ("flax", "phase_jax.run", *others("data"))),
        ("phase_jax/model", ("phase_jax.run", *others("model", "compressors"))),
        ("phase_jax/compressors", ("flax", "phase_jax.run", *others("compressors"))),
        ("phase_jax/training", others("training", "data", "model", "compressors")),
        ("phase_jax/evaluation", others("evaluation", "data", "model", "compressors", "statistics")),
        (
            "phase_jax/interventions",
            others("interventions", "evaluation", "data", "model", "compressors", "statistics"),
        ),
        ("phase_jax/geometry.py", ("jax", "flax", "pallas_kernels", *others())),
    ],
)
def test_arrows_point_down_only(folder, forbidden):
    assert offences(folder, forbidden) == []


def test_kernels_know_nothing_of_the_package_but_geometry_and_axes():
    for file in sorted((ROOT / "pallas_kernels").rglob("*.py")):
        modules = {name for name in imported(file) if name.startswith("phase_jax")}
        allowed = {"phase_jax.geometry", "phase_jax.axes"}
        assert all(".".join(name.split(".")[:2]) in allowed for name in modules), file


def test_only_the_dispatching_function_of_a_kernel_is_used_outside_it():
    for file in sorted((ROOT / "phase_jax").rglob("*.py")):
        assert not any("reference" in name for name in imported(file) if name.startswith("pallas_kernels")), file


def test_a_forbidden_import_would_be_found():
    assert offences("phase_jax/training/loop.py", ("phase_jax.data",))
    assert offences("phase_jax/reports", ("matplotlib",))
