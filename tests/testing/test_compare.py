"""Tests the arguments, comparisons and side effects of `cross_check`."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("jax")
pytest.importorskip("flax")
pytest.importorskip("equinox")

import jax
import jax.numpy as jnp
import torch
from flax import linen, nnx

from gradtools import GradtoolsError
from gradtools.testing import AgreementError, cross_check, first_divergence
from gradtools.testing.matching_parameters.parameter_matching import match_parameters
from tests.support import what_differs

X = np.array([0.3, -0.7, 1.2])
ROWS = np.random.default_rng(0).standard_normal((4, 3))


def quantities(report) -> list[str]:
    return list(dict.fromkeys(c.quantity for c in report))


def paths(report, quantity: str) -> list[str]:
    return [c.path for c in report if c.quantity == quantity]


# --- compared quantities


def test_order_chooses_what_is_compared():
    orders = [
        quantities(cross_check(torch=torch.sin, jax=jnp.sin, args=(X,), order=n)) for n in range(3)
    ]
    second = ["jvp", "hvp, forward over reverse", "hvp, reverse over reverse"]
    assert orders == [["value"], ["value", "gradient"], ["value", "gradient", *second]]


def test_every_leaf_is_compared_under_its_name():
    f = lambda tree, scale: {"a": tree["w"][0] * scale, "b": [tree["b"], tree["b"].sum()]}
    args = ({"w": [X], "b": 2 * X}, np.float64(3.0))
    report = cross_check(torch=f, jax=f, args=args, order=1)
    assert paths(report, "gradient") == ["argument 0[w][0]", "argument 0[b]", "argument 1"]
    assert sorted(paths(report, "value")) == ["output[a]", "output[b][0]", "output[b][1]"]


def test_nan_at_the_same_place_agrees_and_at_another_does_not():
    x = np.array([np.nan, 1.0])
    assert cross_check(order=1, torch=lambda x: 2 * x, jax=lambda x: 2 * x, args=(x,))
    with pytest.raises(AgreementError, match="NaN in torch"):
        cross_check(order=1, torch=lambda x: 2 * x, jax=lambda x: 2 * x[::-1], args=(x,))


def test_what_a_framework_cannot_compute_is_said_and_is_no_disagreement():
    class Reverse(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, c):
            return c * 2

    report = cross_check(torch=Reverse.apply, jax=lambda x: x * 2, args=(X,))
    assert report and "jvp" not in quantities(report)
    assert report.left_out and report.left_out[0].startswith("jvp: torch: ")
    assert "Left out: jvp: torch" in str(report)


def test_a_program_that_fails_says_which_side_failed():
    def broken(x):
        raise ValueError("raised by the program")

    with pytest.raises(ValueError, match="raised by the program") as caught:
        cross_check(torch=torch.sin, jax=broken, args=(X,))
    assert "raised by the jax program" in caught.value.__notes__[0]
    assert "swapped" not in caught.value.__notes__[0]


@pytest.mark.parametrize("operator", [cross_check, first_divergence])
def test_swapped_programs_are_suspected(operator):
    programs = {"torch": lambda x: torch.tanh(x).sum(), "jax": lambda x: jnp.tanh(x).sum()}
    both = dict(zip(programs, reversed(programs.values()), strict=True))
    with pytest.raises(TypeError) as caught:
        operator(**both, args=(np.ones(3),))
    assert "Are torch= and jax= swapped?" in " ".join(caught.value.__notes__)
    with pytest.raises(TypeError) as caught:
        operator(torch=programs["torch"], jax=programs["torch"], args=(np.ones(3),))
    assert "raised by the jax program" in (text := " ".join(caught.value.__notes__))
    assert "Are torch= and jax= swapped?" in text


@pytest.mark.parametrize("by", [torch.sin, jnp.sin])
def test_a_program_of_the_other_framework_names_the_side_and_its_arrays(by):
    words = "the torch program, which is called with torch.Tensors"
    words = "the jax program, which is called with jax.Arrays" if by is torch.sin else words
    with pytest.raises(TypeError) as caught:
        cross_check(torch=by, jax=by, args=(X,))
    assert any(words in note for note in caught.value.__notes__)


# --- conventions


@pytest.mark.parametrize(
    ("by_torch", "by_jax", "x"),
    [
        (lambda x: torch.clamp(x, 0, 1), lambda x: jnp.clip(x, 0, 1), [0.0, 1.0, -2.0]),
        (torch.median, jnp.median, [1.0, 1.0, 0.0]),
        (torch.relu, lambda x: jnp.where(x >= 0, x, 0.0), [0.0, 1.0, -1.0]),
    ],
)
def test_a_difference_at_a_kink_or_tie_is_named_and_is_no_disagreement(by_torch, by_jax, x):
    report = cross_check(torch=by_torch, jax=by_jax, args=(np.array(x),))
    assert report and {c.quantity for c in report.conventions} >= {"gradient", "jvp"}
    assert report.conventions[0].cause == "convention: a kink or tie"
    assert "Convention: gradient of argument 0 at [" in str(report)


def test_a_gradient_that_is_nan_at_a_kink_on_one_side_is_a_disagreement():
    norms = {"torch": torch.linalg.vector_norm, "jax": jnp.linalg.norm}
    with pytest.raises(AgreementError, match="a singular point, where a side is not finite"):
        cross_check(**norms, args=(np.zeros(2),), order=1)


# --- precision


def test_float64_is_switched_on_for_the_check_alone(default_precision):
    seen = []

    def program(x):
        seen.append((x.dtype, jax.config.jax_enable_x64))
        return x * 2

    assert cross_check(order=1, torch=lambda x: x * 2, jax=program, args=(X,))
    assert set(seen) == {(jnp.dtype("float64"), True)}
    assert jnp.asarray(X).dtype == jnp.float32


def test_a_tolerance_of_ones_own_replaces_the_table():
    near = lambda x: jnp.sin(x) * (1 + 1e-6)
    with pytest.raises(AgreementError):
        cross_check(torch=torch.sin, jax=near, args=(X,), order=0)
    assert cross_check(torch=torch.sin, jax=near, args=(X,), order=0, tolerance=1e-5)
    for zero in (0, np.float32(0)):
        assert cross_check(torch=torch.abs, jax=jnp.abs, args=(X,), order=0, tolerance=zero)


def test_a_fault_in_a_tiny_leaf_is_not_hidden_by_a_large_one():
    f = lambda x, y: x.sum() + 1e-25 * (y**2).sum()
    wrong = lambda x, y: x.sum() + 1.1e-25 * (y**2).sum()
    with pytest.raises(AgreementError, match="argument 1"):
        cross_check(order=1, torch=f, jax=wrong, args=(X, X))


def test_the_cross_check_touches_no_grad_and_no_random_state():
    module = torch.nn.Linear(3, 3)
    state = torch.get_rng_state()
    cross_check(torch=module, jax=module_in_jax(module), args=(ROWS.astype("float32"),), order=1)
    assert module.weight.grad is None and module.weight.requires_grad
    assert torch.equal(state, torch.get_rng_state())


# --- modules


def module_in_jax(module: torch.nn.Linear):
    """Convert a linear layer to a JAX function; return (apply, params, state)."""
    params = {"weight": module.weight.detach().numpy(), "bias": module.bias.detach().numpy()}
    apply = lambda p, state, x: (x @ p["weight"].T + p["bias"], state)
    return apply, {name: jnp.asarray(x) for name, x in params.items()}, {}


def two_layers(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))


class Ported(linen.Module):
    @linen.compact
    def __call__(self, x):
        hidden = jnp.tanh(linen.Dense(5)(x))
        return linen.Dense(3)(hidden)


def to_linen(params: dict[str, np.ndarray]) -> dict:
    return {
        f"Dense_{i}": {"kernel": params[f"{2 * i}.weight"].T, "bias": params[f"{2 * i}.bias"]}
        for i in range(2)
    }


def variables(module: torch.nn.Module) -> dict:
    params = {name: p.detach().numpy() for name, p in module.named_parameters()}
    return {"params": jax.tree.map(jnp.asarray, to_linen(params))}


def test_a_transposed_parameter_is_named():
    square = torch.nn.Sequential(torch.nn.Linear(3, 3, bias=False))
    kernel = jnp.asarray(square[0].weight.detach().numpy())
    with pytest.raises(AgreementError) as caught:
        cross_check(
            order=0,
            torch=square,
            jax=(linen.Dense(3, use_bias=False), {"params": {"kernel": kernel}}),
            args=(ROWS.astype("float32"),),
            mapping={"0.weight": ("kernel", (1, 0))},
        )
    first = caught.value.report.first
    assert (first.quantity, first.cause) == ("parameter", "transposed layout")


@pytest.mark.slow_at("linen")
@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_where_parameters_differ_nothing_else_is_compared_and_the_advice_is_right(kind):
    module = two_layers()
    if kind == "linen":
        started = Ported().init(jax.random.key(0), ROWS)
        port: object = (Ported(), started)
    else:
        layers = [nnx.Linear(*sizes, rngs=nnx.Rngs(0)) for sizes in ((3, 5), (5, 3))]
        port = started = nnx.Sequential(layers[0], jnp.tanh, layers[1])
    check = lambda port, **options: cross_check(
        torch=module, jax=port, args=(ROWS,), dtype="float64", order=1, **options
    )
    with pytest.raises(AgreementError, match="mapping = match_parameters") as caught:
        check(port)
    report = caught.value.report
    assert {c.quantity for c in report.comparisons} == {"parameter"}
    assert report.left_out == ["values and derivatives: the models' parameters differ"]
    mapping = match_parameters(module, started)
    copied = mapping.into(started)
    assert check((Ported(), copied) if kind == "linen" else copied, mapping=mapping)


# --- errors


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["torch", "jax"])
def test_a_missing_framework_is_named_with_its_installation(missing):
    program = f"""
import sys
sys.modules[{missing!r}] = None
import numpy as np
from gradtools.testing import cross_check, first_divergence
for check in (cross_check, first_divergence):
    try:
        check(torch=lambda x: x, jax=lambda x: x, args=(np.ones(3),))
    except ModuleNotFoundError as error:
        print(error)
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.stdout.count(f'pip install "gradtools[{missing}]"') == 2, done.stderr


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"args": X}, r"write args=\(x,\)"),
        ({"order": 3}, "expected 0, 1 or 2"),
        ({"jax": lambda x: None, "torch": lambda x: None}, "return no array"),
        ({"jax": torch.nn.Linear(3, 3)}, "jax is a torch.nn module, Linear. Pass the PyTorch"),
        ({"args": (torch.ones(3),)}, "argument 0 is a Tensor, which only one framework accepts"),
        ({"args": ({"a": jnp.ones(3)},)}, r"a jax.Array of .*\['a'\] .*Pass NumPy arrays"),
    ],
)
def test_a_wrong_argument_is_refused_in_words(options, says):
    with pytest.raises(GradtoolsError, match=says):
        cross_check(**{"torch": torch.sin, "jax": jnp.sin, "args": (X,), **options})


def test_where_an_output_is_an_integer_on_one_side_no_derivative_is_compared():
    def theirs(x):
        return {"y": jnp.sin(x), "where": (x > 0).astype(int)}

    def ours(x):
        return {"y": torch.sin(x), "where": (x > 0).to(x.dtype)}

    report = cross_check(torch=ours, jax=theirs, args=(X,), raises=False)
    assert "output[where]" in paths(report, "value")
    assert {c.path for c in report.disagreements} <= {"output[where]"}
    assert quantities(report) == ["dtype", "value"]  # an integer output has no derivative


def test_a_parameter_that_one_model_has_is_constant_and_named():
    module = torch.nn.Linear(3, 3)
    kernel = jnp.asarray(module.weight.detach().numpy().T)
    apply = lambda p, state, x: (x @ p["kernel"] + module.bias.detach().numpy(), state)
    report = cross_check(
        torch=module, jax=(apply, {"kernel": kernel}, {}), args=(ROWS.astype("float32"),), order=1,
        mapping={"weight": "kernel", "bias": None},
    )  # fmt: skip
    assert report and paths(report, "gradient") == ["parameter kernel", "argument 0"]
    assert report.notes == [
        "parameter bias of the torch model has no counterpart: not differentiated"
    ]


@pytest.mark.slow
def test_the_page_of_what_differs_is_what_is_measured():
    page = what_differs.PAGE.read_text(encoding="utf-8")
    assert page == what_differs.written(page)
