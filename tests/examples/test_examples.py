"""Every program in examples/ runs on the backends at hand and prints what it claims."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from gradtools.testing.plugin import wanted_backends

FOLDER = Path(__file__).parents[2] / "examples"

# What every example of own rules prints.
EVERY_DERIVATIVE = [
    r"gradient \S+, forward mode \S+",
    r"reverse over reverse \S+, forward over reverse \S+, reverse over forward",
    r"vmap \S+, compiled \S+",
]

# The lines that each backend must print, as regular expressions.
PRINTED = {
    "u01_adversarial_one_evaluation": [
        r"reverse_gradient: 30 evaluations of f in 30 steps",
        r"the plain way: 60 evaluations",
        r"parameters after 30 steps differ by \S+",
    ],
    "u02_minimax_one_pass": [
        r"50 evaluations of the cost in 50 steps",
        r"parameters differ from signs flipped by hand by \S+",
    ],
    "u03_gradient_penalty": [
        r"per_example_grad and the gradient of the sum differ by \S+",
        r"\|dD/dx\| at the data: \S+ before, \S+ after 40 steps",
        r"through frozen the penalty's gradient is the same: \S+",
        r"and nothing is gained: \S+ MB, double backward \S+ MB",
    ],
    "u03_latent_gradients": [
        r"dg/dy differs from double backward's by \S+",
        r"nearest to their own clean code: \d+% as they come, \d+% after a step down",
        r"so a further z_i takes \S+ MB and \S+ MB",
        r"with frozen that does not depend on G's depth",
        r"at 24 layers it is \d+ times less",
    ],
    "u04_mixed_partial": [
        r"the small case differs from the closed form by \S+",
        r"both ways agree",
        r"mixed_partial's memory does not grow with the depth",
        r"double backward's does",
        r"does not reach the output",
    ],
    "u05_bessel": [
        *EVERY_DERIVATIVE,
        r"the third derivative of J1 is off by \S+",
        r"radius 3\.01\d, brightness",
    ],
    "u05_c_kernel": [
        *EVERY_DERIVATIVE,
        r"the C kernel differs from a loop in Python by \S+",
        r"the reservoir keeps sigmoid\(1\.\d+ -0\.\d+ temperature\)",
    ],
    "u05_cpp_extension": [
        *EVERY_DERIVATIVE,
        r"the C\+\+ kernel differs from a loop in Python by \S+",
        r"a bump at 0\.5",
    ],
    "u05_double_backward": [
        *EVERY_DERIVATIVE,
        r"a third order of the cube's kernels is refused by name",
        r"a plain (torch.autograd.Function: 4\.7622|jax.custom_vjp: no forward mode)",
        r"ours: d2/dx2 sinh\(x\)\^2 at 1 is 7\.5244",
    ],
    "u05_pallas": [
        *EVERY_DERIVATIVE,
        r"the third order differs from the framework's own by \S+",
        r"without a rule the kernel is refused in reverse mode",
    ],
    "u05_sparse_solve": [
        *EVERY_DERIVATIVE,
        r"the sparse solver differs from the dense one by \S+",
        r"found from their temperatures, is off by 0\.0",
    ],
    "u06_contrastive_retrieval": [
        r"chunked differs from the full batch's gradient by \S+",
        r"a step needs \d+ MB in chunks of 8, \d+ MB with the full batch",
        r"recall@1 from \S+ to \S+, recall@5",
    ],
    "u07_grad_or_accumulate": [
        r"grad returns \(6, 5\) and leaves the buffers alone",
        r"accumulating x1 twice adds to x1 alone: \(12, 0\)",
        r"8 threads at once: 0 gradients differ",
        r"no buffer was touched",
    ],
    "u08_differential_equation": [
        r"the loss's gradient differs from 2/n J\^T r by \S+",
        r"largest error against exp\(-t\^2\) on \[0, 2\]: \d\.\de-0[4-9]",
    ],
    "u09_complex_affine": [
        r"dL/dI = W\^H dL/dO: off by \S+",
        r"dL/dW = dL/dO I\^H: off by \S+",
        r"as pairs of real arrays: off by \S+",
        r"a step along -dL/dW descends",
    ],
    "u09_formula": [
        r"order 1: x̄ = 3 ȳ ⊙ x²\n  order 2: ∂s/∂x = 6 ȳ ⊙ x ⊙ u, ∂s/∂ȳ = 3 u ⊙ x²",
        r"out/sinh_order_2_(torch|jax)\.html: \d+ operations in 3 passes, \d+ bytes kept",
        r"natively: W̄ = ȳ Iᴴ, Ī = Wᴴ ȳ, b̄ = ȳ",
        r"put together: W̄ = Ō Iᴴ, Ī = Wᴴ Ō, b̄ = Ō",
        r"with Wᵀ for Wᴴ: no: Ī\[0\] is \S+ by automatic differentiation, \S+ by the derivation",
        r"the two gradients are equal: off by \S+",
        r"derived by hand: yes: agrees at the arguments and 3 random points",
        r"without the flip: no: X̄\[0, 0, 0, 0\] is \S+ by automatic differentiation, \S+ by",
        r"without the transpose: no: W̄ has shape \(4, 12\), the derivation gives \(12, 4\)",
    ],
    "u10_lost_gradient": [
        r"through NumPy the volume fraction goes from 0\.16 to 0\.2\d, not to 0\.6",
        r"argument 0 gets a gradient, but one term of the loss contributes nothing to it",
        r"u10_lost_gradient\.py:\d+ in fraction_through_numpy: left_framework",
        r"with straight_through it reaches 0\.6\d\d",
        r"and nothing is lost any more",
    ],
    "u11_several_losses": [
        r"weighted by letters, the chunks' gradient is off by \S+",
        r"with equal weights it would be off by \d",
        r"microbatched_value_and_grad, in chunks of 4, 4 and 2, is off by \S+",
        r"one loss after the other differs from their sum by \S+",
    ],
    "u12_gradient_through_a_sampler": [
        r"the sampler inside differs from two stages by hand by \S+",
        r"replaced, it differs from the pullback by hand by \S+",
        r"the mean of 400 draws is \S+ from the plain gradient",
    ],
    "u14_bridge": [
        r"the Hessian through the bridge differs from the native one by \S+",
        r"Newton's method finds length 0\.800, damping 0\.300",
        r"from its slopes alone: loss \S+ to \S+",
    ],
    "u18_unrolled_optimization": [
        r"through five steps both modes differ by \S+",
        r"one more step takes \S+ kB by double backward, \S+ kB this way",
        r"the outer loss goes from \S+ to \S+",
        r"of the 8 lightest examples \d have the wrong sign",
    ],
    "u20_implicit_solution": [
        r"equilibrium: the gradients differ from the unrolled ones by \S+",
        r"equilibrium: the Hessian products differ by \S+",
        r"equilibrium: 100 steps of training",
        r"ridge: the hypergradient differs from the closed form's by \S+",
        r"ridge: the validation loss goes from \S+ to \S+",
        r"ridge: the useless features get the larger penalties",
    ],
    "u19_retained_gradients": [
        r"the gradient vanishes with the distance",
        r"they differ from those of added arrays by \S+",
        r"the gradient of the weights is the plain one",
        r"20 steps on the penalty: \S+ to \S+",
    ],
    "u17_sparse_jacobian": [
        r"2998 entries of 1000000, which differ by \S+",
        r"after four Newton steps the residual is \S+",
        r"a sparse Hessian of 2998 entries differs by \S+",
    ],
    "u15_token_means_over_ranks": [
        r"the mean over ranks and chunks is off by \S+ on each rank",
        r"the mean of the ranks' token means is off by \d",
        r"the mean of all chunks' means is off by \d",
    ],
    "u16_meanflow": [
        r"of digits drawn in one step \d+% show the requested digit before training, [89]\d% after",
        r"they differ as real ones do: deviation 0\.\d+ to 0\.\d+",
    ],
}


KEPT = FOLDER / "printed"
QUICK = ("u03_latent_gradients", "u06_contrastive_retrieval")  # which have --quick

# Whose backends differ by rounding, neither by nothing nor by more.
CLOSE = (
    *("u03_gradient_penalty", "u04_mixed_partial", "u05_pallas", "u09_complex_affine"),
    *("u09_formula", "u14_bridge"),
)
LEFT_OUT = re.compile(r"^  left out: (.*)", re.MULTILINE)


def masked(printed: str) -> str:
    """What was printed without its numbers, which may differ in their last digits."""
    return re.sub(r"-?\d+(\.\d+)?(e[-+]\d+)?%?", "#", re.sub(r" +", " ", printed))


def sections(printed: str) -> dict[str, str]:
    """What was printed under each heading: a backend, or both."""
    parts = re.split(r"^(torch|jax|both):\n", printed, flags=re.MULTILINE)
    assert parts[0] == "", printed
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_every_example_is_listed_here():
    assert {path.stem for path in FOLDER.glob("u*.py")} == set(PRINTED)


@pytest.mark.quick_at("u09_complex_affine")
@pytest.mark.parametrize("name", PRINTED)
def test_an_example_keeps_its_claims(name, asked, run):
    """One run for both backends, as a user's own is, which also compares their numbers."""
    printed = run(name, asked)
    parts = sections(printed)
    expected = ["torch", "jax"] if asked == "both" else [asked]
    left_out = [found[1] for part in parts.values() for found in LEFT_OUT.finditer(part)]
    assert list(parts) == [*expected, *(["both"] if asked == "both" and not left_out else [])]
    for backend in expected:
        for line in () if LEFT_OUT.search(parts[backend]) else PRINTED[name]:
            assert re.search(line, parts[backend]), (
                f"{name} on {backend}: {line!r} was not printed:\n{printed}"
            )
    if left_out:
        pytest.skip("; ".join(left_out))  # such as: no C compiler
    if asked == "both":
        kept = KEPT.joinpath(f"{name}.txt").read_text(encoding="utf-8")
        assert name in QUICK or masked(printed) == masked(kept), f"python examples/keep.py {name}"
        difference = re.match(r"  largest difference between the backends (\S+)\n", parts["both"])
        assert float(difference[1]) < (1e-9 if name in CLOSE else 1.0)


def test_an_example_that_fails_is_told_by_its_name_with_what_it_printed(run, monkeypatch):
    def broken(*args, **kwargs):
        print("torch:\n  as it should be")
        sys.exit("  FAILED: two and two are five")

    monkeypatch.setattr(runpy, "run_path", broken)
    with pytest.raises(pytest.fail.Exception) as left:
        run("u09_formula", "both")
    for part in ("u09_formula --backend both", "as it should be", "FAILED: two and two are five"):
        assert part in str(left.value)


@pytest.mark.slow
def test_an_example_is_a_program_of_its_own(backend_name):
    command = [sys.executable, FOLDER / "u09_complex_affine.py", "--backend", backend_name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "descends" in done.stdout


def test_a_claim_that_fails_ends_an_example(common):
    with pytest.raises(SystemExit) as left:
        common.claim("two and two are five", False)
    assert left.value.code == "  FAILED: two and two are five"  # a text means status 1


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
    """Runs an example as `python examples/NAME.py --backend BACKEND` does, in this process."""
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
    """What is given as --backend: both, unless only one is there or wanted."""
    wanted = wanted_backends(pytestconfig)
    return wanted[0] if len(wanted) == 1 else "both"


@pytest.fixture
def common(monkeypatch):
    """The module that the examples share."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import common

    return common


@pytest.fixture
def both():
    """For a test that needs both frameworks."""
    pytest.importorskip("torch")
    pytest.importorskip("jax")
