"""Every program in examples/ runs on the available backends and prints the stored output."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from gradtools.testing.plugin import wanted_backends

FOLDER = Path(__file__).parents[2] / "examples"

NAMES = sorted(path.stem for path in FOLDER.glob("u*.py"))
KEPT = FOLDER / "printed"
QUICK = {  # examples that support --quick, and patterns of their --quick output
    "u03_latent_gradients": [
        r"dg/dy differs from double backward by \S+",
        r"nearest clean code is their own: \d+% before, \d+% after an energy step",
        r"each additional z_i needs \S+ MB, with double backward \S+ MB",
        r"with frozen the memory does not depend on G's depth",
        r"at 24 layers frozen needs \d+ times less memory",
    ],
    "u06_contrastive_retrieval": [
        r"chunked differs from the full batch's gradient by \S+",
        r"a step needs \d+ MB in chunks of 8, \d+ MB with the full batch",
        r"recall@1 from \S+ to \S+, recall@5",
    ],
}

# Examples for which the results of the backends differ, but only by rounding errors.
CLOSE = (
    *("u03_gradient_penalty", "u04_mixed_partial", "u05_pallas", "u09_complex_affine"),
    *("u09_formula", "u14_bridge"),
)
LEFT_OUT = re.compile(r"^  left out: (.*)", re.MULTILINE)


def masked(printed: str) -> str:
    """Replace the numbers in the output, because their last digits may differ."""
    return re.sub(r"-?\d+(\.\d+)?(e[-+]\d+)?%?", "#", re.sub(r" +", " ", printed))


def sections(printed: str) -> dict[str, str]:
    """Return the printed output under each of the headings torch, jax and both."""
    parts = re.split(r"^(torch|jax|both):\n", printed, flags=re.MULTILINE)
    assert parts[0] == "", printed
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.quick_at("u09_complex_affine")
@pytest.mark.parametrize("name", NAMES)
def test_an_example_keeps_its_claims(name, asked, run):
    """Run the example for the available backends, as a user does, and check the stored output."""
    printed = run(name, asked)
    parts = sections(printed)
    expected = ["torch", "jax"] if asked == "both" else [asked]
    left_out = [found[1] for part in parts.values() for found in LEFT_OUT.finditer(part)]
    assert list(parts) == [*expected, *(["both"] if asked == "both" and not left_out else [])]
    kept = sections(KEPT.joinpath(f"{name}.txt").read_text(encoding="utf-8"))
    for backend in expected:
        for line in QUICK.get(name, ()):
            assert re.search(line, parts[backend]), f"{line!r} was not printed:\n{printed}"
        if name not in QUICK and not LEFT_OUT.search(parts[backend]):
            wanted = masked(kept[backend])
            assert masked(parts[backend]) == wanted, f"python examples/keep.py {name}"
    if left_out:
        pytest.skip("; ".join(left_out))  # for example, because there is no C compiler
    if asked == "both":
        difference = re.match(r"  largest difference between the backends (\S+)\n", parts["both"])
        assert float(difference[1]) < (1e-9 if name in CLOSE else 1.0)


def test_an_example_that_fails_is_told_by_its_name_with_what_it_printed(run, monkeypatch):
    def broken(*args, **kwargs):
        print("torch:\n  a correct line")
        sys.exit("  FAILED: 1 + 1 is 3")

    monkeypatch.setattr(runpy, "run_path", broken)
    with pytest.raises(pytest.fail.Exception) as left:
        run("u09_formula", "both")
    for part in ("u09_formula --backend both", "a correct line", "FAILED: 1 + 1 is 3"):
        assert part in str(left.value)


@pytest.mark.slow
def test_an_example_is_a_program_of_its_own(backend_name):
    command = [sys.executable, FOLDER / "u09_complex_affine.py", "--backend", backend_name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "reduces L" in done.stdout


def test_a_claim_that_fails_ends_an_example(common):
    with pytest.raises(SystemExit) as left:
        common.claim("1 + 1 is 3", False)
    # a string argument of sys.exit means exit status 1
    assert left.value.code == "  FAILED: 1 + 1 is 3"


def test_backends_that_disagree_end_an_example(common, monkeypatch, both):
    monkeypatch.setattr(sys, "argv", ["example", "--backend", "both"])
    numbers = {"torch": 1.0, "jax": 1.0 + 1e-9}
    with pytest.raises(SystemExit, match="FAILED: largest difference"):
        common.main(lambda gt, backend: {"number": numbers[backend]})


def test_nan_is_a_difference(common):
    assert common.difference(common.np.array([float("nan")]), common.np.ones(1)) == float("inf")


def test_double_precision_is_given_back(common):
    jax = pytest.importorskip("jax")
    before = jax.config.jax_enable_x64
    try:
        jax.config.update("jax_enable_x64", False)
        with common.double_precision("jax"):
            assert jax.config.jax_enable_x64
        assert not jax.config.jax_enable_x64
    finally:
        jax.config.update("jax_enable_x64", before)


@pytest.fixture
def run(monkeypatch, capsys, quick_by_hand):
    """Run an example in this process as `python examples/NAME.py --backend BACKEND` would."""
    monkeypatch.syspath_prepend(str(FOLDER))

    def run(name: str, backend: str) -> str:
        quick = ["--quick"] if name in QUICK else []
        monkeypatch.setattr(sys, "argv", [name, "--backend", backend, *quick])
        try:
            runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
        except SystemExit as left:
            pytest.fail(f"{name} --backend {backend}:\n{capsys.readouterr().out}{left.code}")
        return capsys.readouterr().out

    return run


@pytest.fixture
def asked(pytestconfig):
    """Return the value of --backend: "both", or the only backend that is available or selected."""
    wanted = wanted_backends(pytestconfig)
    return wanted[0] if len(wanted) == 1 else "both"


@pytest.fixture
def common(monkeypatch):
    """Import the module of helpers that the examples share."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import common

    return common


@pytest.fixture
def both():
    """Skip the test unless both frameworks are installed."""
    pytest.importorskip("torch")
    pytest.importorskip("jax")
