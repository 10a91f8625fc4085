"""Second derivatives over custom code: the right number, or a refusal that names the class.

Each case is a function through one torch.autograd.Function or one operator, with its true second
derivative in closed form. What its backward pass loses is refused; what is constant is zero.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd.function import Function, once_differentiable

import gradtools.torch as gt
from gradtools.errors import GradtoolsError, LostDerivativeError

X = 1.5
Tensor = torch.Tensor


class _Cube(Function):
    """x^3; what is missing is its backward."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x**3

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.save_for_forward(inputs[0])

    @staticmethod
    def jvp(ctx: Any, t: Tensor) -> Tensor:
        return 3 * ctx.saved_tensors[0] ** 2 * t


class Right(_Cube):
    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return 3 * ctx.saved_tensors[0] ** 2 * g


class Once(_Cube):
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        return 3 * ctx.saved_tensors[0] ** 2 * g


class NoGrad(_Cube):
    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        with torch.no_grad():
            return 3 * ctx.saved_tensors[0] ** 2 * g


class Detached(_Cube):
    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return 3 * ctx.saved_tensors[0].detach() ** 2 * g


class Sinh(Function):
    """torch#76185: two intermediates are saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        a, b = x.exp(), (-x).exp()
        ctx.save_for_backward(a, b)
        return (a - b) / 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        a, b = ctx.saved_tensors
        return g * (a + b) / 2


class ByNumpy(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.x = x.detach().numpy()
        return torch.from_numpy(np.asarray(np.sin(ctx.x)))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g * torch.from_numpy(np.asarray(np.cos(ctx.x)))


class Wrapped(Function):
    """Calls another Function in its own, as layers of layers do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, power: int, name: str = "") -> Tensor:
        ctx.save_for_backward(x)
        ctx.power = power
        return NoGrad.apply(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            (dx,) = torch.autograd.grad(x**ctx.power, x, g.detach())
        return dx, None, None


class Two(Function):
    """Two outputs, with no zeros for what is not used."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.x, ctx.w = x, w
        return x**3, w * x

    @staticmethod
    def backward(ctx: Any, a: Tensor | None, b: Tensor | None) -> Any:
        x = ctx.x.detach()
        dx = 0 if a is None else 3 * x**2 * a
        return dx + (0 if b is None else ctx.w * b), None


class Adjoint(Function):
    """dy/dt = -y^2 from y = x at t = 0 to 1, whose adjoint is solved backwards under no_grad."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x / (1 + x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        with torch.no_grad():
            y = ctx.saved_tensors[0]
            return g * (1 - y) ** 2


class Linear(Function):
    """Its weight is a frozen constant that is saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(w)
        return x * w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g * ctx.saved_tensors[0], None


class Mask(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mask = (x > 0).to(x)
        return x * ctx.mask

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g * ctx.mask


class Through(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g


class Dropout(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.keep = (torch.rand_like(x) >= 0).to(x)
        return x * ctx.keep

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g * ctx.keep


class InPlace(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g * 2


@cache
def _operator(name: str) -> Any:
    """x^3 by torch.library, whose backward is differentiable or not."""

    @torch.library.custom_op(f"gradtools_lost::{name}", mutates_args=())
    def cube(x: Tensor) -> Tensor:
        return x**3

    def backward(ctx: Any, g: Tensor) -> Tensor:
        with torch.set_grad_enabled(name == "right"):
            return 3 * ctx.saved_tensors[0] ** 2 * g

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    cube.register_autograd(backward, setup_context=setup)
    return cube


@cache
def _without_kernel() -> Any:
    """An operator without an autograd kernel, as a C++ extension may leave it."""
    library = torch.library.Library("gradtools_lost_kernel", "DEF")
    library.define("sine(Tensor x) -> Tensor")
    sine = lambda x: torch.from_numpy(np.asarray(np.sin(x.detach().numpy())))
    library.impl("sine", sine, "CPU")
    return library, torch.ops.gradtools_lost_kernel.sine


@dataclass(frozen=True)
class Case:
    """A function of one number, its derivatives at X, and what is said where they are lost."""

    name: str
    a: Callable[[Tensor], Tensor]
    first: float
    second: float
    lost: str = ""
    pushed: bool = False  # whether its cotangent is lost as well

    def __str__(self) -> str:
        return self.name


_W = torch.tensor(2.5, dtype=torch.float64)
_CUBE = (3 * X**2, 6 * X)
CASES = (
    Case("right", Right.apply, *_CUBE),
    Case("linear", lambda x: Linear.apply(x, _W), 2.5, 0.0),
    Case("mask", Mask.apply, 1.0, 0.0),
    Case("straight-through", Through.apply, 1.0, 0.0),
    Case("dropout", Dropout.apply, 1.0, 0.0),
    Case("in place", lambda x: InPlace.apply(x * 1), 2.0, 0.0),
    Case("operator", lambda x: _operator("right")(x), *_CUBE),
    Case("once differentiable", Once.apply, *_CUBE, "Function Once", True),
    Case("no_grad", NoGrad.apply, *_CUBE, "Function NoGrad", True),
    Case("detached", Detached.apply, *_CUBE, "Function Detached"),
    Case("intermediates", Sinh.apply, np.cosh(X), np.sinh(X), "Function Sinh"),
    Case("NumPy", ByNumpy.apply, np.cos(X), -np.sin(X), "Function ByNumpy"),
    Case("nested", lambda x: Wrapped.apply(x, 3), *_CUBE, "Function Wrapped", True),
    Case("two outputs", lambda x: Two.apply(x, _W)[0], *_CUBE, "Function Two"),
    Case("adjoint", Adjoint.apply, (1 + X) ** -2, -2 * (1 + X) ** -3, "Function Adjoint", True),
    Case(
        "lost in an operator",
        lambda x: _operator("lost")(x),
        *_CUBE,
        "operator gradtools_lost_lost",
        True,
    ),
)
LOST = [c for c in CASES if c.lost]
HONEST = [c for c in CASES if not c.lost]


def _x(dtype: Any = torch.float64) -> Tensor:
    return torch.tensor(X, dtype=dtype)


def _second(f: Callable[..., Any], x: Tensor) -> dict[str, Callable[[], Tensor]]:
    """f'' at x, by each operator."""
    one = torch.ones_like(x)
    return {
        "grad of grad": lambda: gt.grad(gt.grad(f))(x),
        "strict": lambda: gt.grad(gt.grad(f), disconnected_inputs="strict")(x),
        "zeros": lambda: gt.grad(gt.grad(f), disconnected_inputs="zeros")(x),
        "hvp": lambda: gt.hvp(f, (x,), (one,))[1][0],
        "hessian": lambda: gt.hessian(f)(x),
        "jacobian of grad": lambda: gt.jacobian(gt.grad(f))(x),
        "linearize of grad": lambda: gt.linearize(gt.grad(f), x)[1](one),
        "grad of linearize": lambda: gt.grad(lambda x: gt.linearize(f, x)[1](one))(x),
        "vjp of vjp": lambda: gt.vjp(lambda x: gt.vjp(f, x)[1](one)[0], x)[1](one)[0],
        "trees": lambda: gt.grad(lambda p: gt.grad(lambda p: f(p["a"]))(p)["a"])({"a": x})["a"],
        "per example": lambda: gt.per_example_grad(lambda x, k: gt.grad(f)(x) * k, chunk_size=1)(
            x, one[None]
        )[0],
    }


@pytest.mark.parametrize("case", CASES, ids=str)
def test_first_derivatives_are_what_they_were(case):
    x = _x()
    assert float(gt.grad(case.a)(x)) == pytest.approx(case.first, abs=1e-12)
    found = float(gt.vjp(case.a, x)[1](torch.ones_like(x))[0])
    assert found == pytest.approx(case.first, abs=1e-12)


@pytest.mark.parametrize("outer", ["alone", "squared"])
@pytest.mark.parametrize("case", HONEST, ids=str)
def test_honest_custom_code_has_its_second_derivative(case, outer):
    f, true = _composed(case, outer)
    for _ in range(2):  # tried, and then known
        for name, way in _second(f, _x()).items():
            assert float(way()) == pytest.approx(true, abs=1e-10), name


@pytest.mark.slow_at("alone")
@pytest.mark.whole_at("lost in an operator")
@pytest.mark.parametrize("outer", ["alone", "squared"])
@pytest.mark.parametrize("case", LOST, ids=str)
def test_lost_second_derivatives_are_refused_by_name(case, outer):
    f, _ = _composed(case, outer)
    for _ in range(2):
        for name, way in _second(f, _x()).items():
            with pytest.raises(GradtoolsError, match=case.lost):
                raise AssertionError(f"{name}: {way()}")


def _composed(case: Case, outer: str) -> tuple[Callable[..., Any], float]:
    if outer == "alone":
        return case.a, case.second
    x = _x()
    return lambda x: case.a(x) ** 2, float(2 * case.a(x) * case.second + 2 * case.first**2)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_linearize_pushes_what_the_cotangent_keeps(case):
    x = _x()
    if case.pushed:
        with pytest.raises(GradtoolsError, match=f"^linearize: .*{case.lost}"):
            gt.linearize(case.a, x)[1](x)
    else:
        found = float(gt.linearize(case.a, x)[1](x))
        assert found == pytest.approx(case.first * X, abs=1e-12)


@pytest.mark.parametrize("case", LOST, ids=str)
def test_the_native_outer_derivative_is_refused_too(case):
    x = _x().requires_grad_()
    dx = gt.grad(lambda x: case.a(x) ** 2)(x)
    with pytest.raises(GradtoolsError, match=case.lost):
        torch.autograd.grad(dx, x)
    x = _x().requires_grad_()
    with pytest.raises(GradtoolsError, match=case.lost):
        gt.grad(lambda x: case.a(x) ** 2)(x).backward()


@pytest.mark.slow_at("Once", "NoGrad", "Detached")
@pytest.mark.parametrize("kind", [Right, Once, NoGrad, Detached])
def test_functorch_and_forward_over_reverse_give_the_number_or_the_name(kind):
    f, x = (lambda x: kind.apply(x) ** 2), _x()
    one = torch.ones_like(x)
    ways = {
        "forward over reverse": lambda: gt.hvp(f, (x,), (one,), mode="forward_over_reverse")[1][0],
        "jvp of grad": lambda: gt.jvp(gt.grad(f), (x,), (one,))[1],
        "vmap": lambda: torch.vmap(gt.grad(gt.grad(f)))(x[None])[0],
        "vmap of hessian": lambda: torch.vmap(gt.hessian(f))(x[None])[0],
        "torch.func": lambda: torch.func.grad(gt.grad(f))(x),
        "per example": lambda: gt.per_example_grad(lambda x, k: gt.grad(f)(x) * k)(x, one[None])[0],
        "forward jacobian": lambda: gt.jacobian(gt.grad(f), mode="forward")(x),
    }
    for name, way in ways.items():
        if kind is Right:
            assert float(way()) == pytest.approx(30 * X**4, rel=1e-12), name
        else:
            with pytest.raises(GradtoolsError, match=f"Function {kind.__name__}"):
                raise AssertionError(f"{name}: {way()}")


@pytest.mark.slow_at(("no_grad", "frozen"), ("detached", "frozen"), ("two outputs", "frozen"))
@pytest.mark.parametrize("around", ["frozen", "chunked", "checkpoint"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_is_computed_again_is_looked_at_as_well(case, around):
    if (case.name, around) == ("operator", "frozen"):
        pytest.skip("of forward mode through operators that have none")
    a = {"frozen": gt.frozen, "checkpoint": gt.checkpoint}.get(around, lambda a: gt.chunked(a, 1))
    x = _x()[None]
    f = lambda x: (a(case.a)(x) ** 2).sum()
    ways = {
        "hvp": lambda: gt.hvp(f, (x,), (torch.ones_like(x),))[1][0],
        "grad of grad": lambda: gt.grad(lambda x: gt.grad(f)(x).sum())(x),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # frozen says which way it goes
        for name, way in ways.items():
            if case.lost:
                with pytest.raises(GradtoolsError, match=case.lost):
                    raise AssertionError(f"{name}: {way()}")
            else:
                true = _composed(case, "squared")[1]
                assert float(way()) == pytest.approx(true, abs=1e-10), name


def test_what_is_not_asked_for_is_not_refused():
    """z goes through a lost class, y does not: d^2 f / dy^2 and d^2 f / dz dy are right."""
    f = lambda y, z: NoGrad.apply(z) + torch.sin(y) * z
    y, z = _x(), _x() / 2
    found = gt.grad(lambda y: gt.grad(f, 1)(y, z))(y)
    assert float(found) == pytest.approx(np.cos(X), abs=1e-12)
    tracked = z.clone().requires_grad_()
    found = gt.grad(lambda y: gt.grad(f, 1)(y, tracked))(y)
    assert float(found) == pytest.approx(np.cos(X), abs=1e-12)
    with pytest.raises(GradtoolsError, match="Function NoGrad"):
        gt.grad(lambda z: gt.grad(f, 1)(y, z))(z)


def test_a_loss_along_the_cotangent_alone_is_refused():
    f = lambda y, z: NoGrad.apply(z) * y  # d^2 f / dy dz = 3 z^2
    with pytest.raises(GradtoolsError, match="Function NoGrad"):
        gt.grad(lambda y: gt.grad(f, 1)(y, _x()))(_x())


def test_mixed_partial_needs_no_second_derivative_of_G():
    x = _x()
    found = gt.mixed_partial(lambda y, g: torch.sin(y) * g, NoGrad.apply, x, x, x)
    assert float(found) == pytest.approx(np.cos(X) * 3 * X**3, abs=1e-12)
    with pytest.raises(GradtoolsError, match="Function NoGrad"):
        gt.mixed_partial(lambda y, g: NoGrad.apply(y * g), lambda z: z, x, x, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex128])
def test_other_dtypes(dtype):
    x = torch.tensor([0.7, 1.3], dtype=dtype)
    f = lambda x: (NoGrad.apply(x).abs() ** 2).sum() if dtype.is_complex else Sinh.apply(x).sum()
    with pytest.raises(GradtoolsError, match="autograd cannot differentiate"):
        gt.hvp(f, (x,), (x,))
    if dtype.is_complex:
        found = gt.hvp(lambda x: (Linear.apply(x, _W) * x).real.sum(), (x,), (x,))[1][0]
        assert torch.allclose(found, 5 * x.conj())
    else:
        found = gt.hvp(lambda x: (Linear.apply(x, _W.float()) * x).sum(), (x,), (x,))[1][0]
        assert torch.allclose(found, 5 * x)


def test_a_class_that_is_handed_functions_is_judged_by_the_one_at_hand():
    class Of(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, slope: Any) -> Tensor:
            ctx.save_for_backward(x)
            ctx.slope = slope
            return x * 1

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            return g * ctx.slope(ctx.saved_tensors[0]), None

    lost = lambda x: Of.apply(x, lambda x: x.detach() ** 2)
    fine = lambda x: Of.apply(x, lambda x: x**2)
    with pytest.raises(GradtoolsError, match="Function Of"):
        gt.grad(gt.grad(lost))(_x())
    assert float(gt.grad(gt.grad(fine))(_x())) == pytest.approx(2 * X)


def test_an_operator_without_an_autograd_kernel_is_refused_at_first_order():
    sine = _without_kernel()[1]
    f = lambda x: x * x + sine(x)
    ways = {
        "grad": lambda: gt.grad(f)(_x()),
        "vjp": lambda: gt.vjp(f, _x())[1](_x()),
        "hvp": lambda: gt.hvp(f, (_x(),), (_x(),)),
        "linearize": lambda: gt.linearize(f, _x())[1](_x()),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, way in ways.items():
            with pytest.raises(GradtoolsError, match=f"^{name}: f holds an operator without"):
                way()

    def constant(x: Tensor) -> Tensor:
        with torch.no_grad():
            y = sine(x)
        return x * x + y

    assert float(gt.grad(constant)(_x())) == pytest.approx(2 * X)


def test_a_class_is_tried_once_and_leaves_nothing_behind():
    calls = []
    layer = torch.nn.BatchNorm1d(1, dtype=torch.float64)

    class Counted(Linear):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            calls.append(1)
            return Linear.forward(ctx, x, w)

    f = lambda x: (Counted.apply(layer(x), _W) ** 2 * torch.rand(())).sum()
    x = torch.randn(4, 1, dtype=torch.float64)
    torch.manual_seed(0)
    gt.hvp(f, (x,), (x,))
    drawn, seen = torch.rand(()), int(layer.num_batches_tracked)
    torch.manual_seed(0)
    torch.rand(())
    assert torch.equal(drawn, torch.rand(()))
    assert seen == 1
    before = len(calls)
    gt.hvp(f, (x,), (x,))
    assert len(calls) == before + 1
    assert "apply" not in torch.autograd.function._SingleLevelFunction.__dict__


def test_a_first_derivative_tries_nothing():
    calls = []

    class Seen(NoGrad):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            calls.append(1)
            return x**3

    gt.grad(Seen.apply)(_x())
    with torch.no_grad():
        gt.vjp(Seen.apply, _x())[1](_x())
    assert len(calls) == 2


# --- what cannot be tried ----------------------------------------------------------------


def _on_a_grid(slope: Callable[[Tensor], Tensor]) -> Any:
    """x^3 of multiples of 1/8 alone, near which there is nothing to try."""

    class Gridded(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            if not torch.equal(8 * x, (8 * x).round()):
                raise ValueError("off the grid")
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            return slope(ctx.saved_tensors[0]) * g

    return Gridded


def _seldom(how: str) -> Callable[[Tensor], Tensor]:
    """A function that cannot be tried by calling it once more; its derivative is lost."""

    class Seldom(Detached):
        pass

    left = [1.0]

    def f(x: Tensor) -> Tensor:
        if how == "raises":
            return left.pop() * Seldom.apply(x)
        if how == "another way":
            return Seldom.apply(x) * left.pop() if left else x**3
        found: list[Tensor] = []
        thread = threading.Thread(target=lambda: found.append(Seldom.apply(x)))
        thread.start()
        thread.join()
        return found[0]

    return f


@pytest.mark.slow_at("grid-Function Gridded.*ValueError: off the grid")
@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("grid", "Function Gridded.*ValueError: off the grid"),
        ("raises", "Function Seldom.*f raises IndexError"),
        ("another way", "Function Seldom.*does not call it"),
        ("in a thread", "Function Seldom.*does not call it in this thread"),
    ],
)
def test_a_class_that_cannot_be_tried_is_refused(how, why):
    kept = _second(lambda x: None, _x())
    ways = [name for name in kept if how == "grid" or name not in ("hessian", "trees")]
    for name in ways:
        f = _on_a_grid(lambda x: 3 * x.detach() ** 2).apply if how == "grid" else _seldom(how)
        with pytest.raises(GradtoolsError, match=why):
            raise AssertionError(f"{name}: {_second(f, _x())[name]()}")


@pytest.mark.parametrize("old", [True, False])
@pytest.mark.parametrize("right", [True, False])
def test_a_class_that_f_makes_in_each_call_is_tried(right, old):
    def f(x):
        class Made(Function):
            @staticmethod
            def backward(ctx: Any, g: Tensor) -> Any:
                (y,) = ctx.saved_tensors
                return g * (y if right else y.detach())

        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(y := x.exp())
            return y

        Made.forward = staticmethod(forward if old else lambda x: x.exp())
        if not old:
            Made.setup_context = staticmethod(lambda ctx, _, y: ctx.save_for_backward(y))
        return Made.apply(x).square()

    ways = {
        "grad of grad": lambda x: gt.grad(gt.grad(f))(x),
        "hessian": gt.hessian(f),
        "hvp": lambda x: gt.hvp(f, (x,), (torch.ones_like(x),))[1][0],
    }
    for name, second in ways.items():
        if right:
            assert float(second(_x())) == pytest.approx(4 * math.exp(2 * X)), name
        else:
            with pytest.raises(GradtoolsError, match=r"Function Made.*torch#76185"):
                raise AssertionError(f"{name}: {second(_x())}")


def _cubed_with(w: Tensor) -> Any:
    class Cubed(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return (w * x) ** 3

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            (x,) = ctx.saved_tensors
            return g * 3 * w * (w * x) ** 2

    return Cubed


def test_classes_of_one_statement_are_tried_by_calls_of_their_own():
    """Another class that the statement made may take other shapes."""
    long, short = _cubed_with(torch.full((3,), 0.5)), _cubed_with(torch.full((2,), 2.0))

    def f(x):
        y = x.sum().expand(3)
        for _ in range(5):
            y = long.apply(y) + 1.0
        return short.apply(x).sum() + 0.0 * y.detach().sum()

    x = torch.tensor([0.3, 0.7])
    torch.testing.assert_close(gt.hessian(f)(x), torch.diag(48.0 * x))


def test_a_class_that_was_tried_elsewhere_is_remembered():
    tolerance = [0.0]

    class Near(Right):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            if abs(float(x) - X) > tolerance[0]:
                raise ValueError("too far")
            return x**3

    with pytest.raises(GradtoolsError, match="take a second derivative of it once where"):
        gt.grad(gt.grad(Near.apply))(_x())
    tolerance[0] = 1.0
    assert float(gt.grad(gt.grad(Near.apply))(_x())) == pytest.approx(6 * X)
    tolerance[0] = 0.0
    assert float(gt.grad(gt.grad(Near.apply))(_x())) == pytest.approx(6 * X)


@pytest.mark.parametrize("where", ["empty", "flat"])
@pytest.mark.parametrize("pushed", [False, True])
def test_a_class_is_not_trusted_for_a_trial_where_its_derivative_is_zero(where, pushed):
    class SquaredRelu(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.slope = 2 * x.detach().relu()
            return x.relu() ** 2

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            return ctx.slope * g

        @staticmethod
        def jvp(ctx: Any, t: Tensor) -> Tensor:
            return ctx.slope * t

    def slope(x: Tensor) -> Tensor:
        f = lambda x: SquaredRelu.apply(x).sum()
        if pushed:
            return gt.jvp(f, (x,), (torch.ones_like(x),))[1]
        return gt.grad(f)(x).sum()

    x = torch.zeros(0, dtype=torch.float64) if where == "empty" else -_x()[None]
    assert torch.equal(gt.grad(slope)(x), torch.zeros_like(x))
    with pytest.raises(GradtoolsError, match="Function SquaredRelu"):
        gt.grad(slope)(_x()[None])


def test_a_class_that_takes_no_negative_numbers_is_tried_along_its_argument():
    class Positive(Right):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            if bool((x < 0).any()):
                raise ValueError("negative")
            return x**3

    x = torch.tensor([0.0, 1e-9, X], dtype=torch.float64)
    found = gt.hvp(lambda x: Positive.apply(x).sum(), (x,), (torch.ones_like(x),))[1][0]
    assert torch.allclose(found, 6 * x)


def test_what_a_class_loses_that_writes_in_place_is_refused():
    class Squared(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.slope = 2 * x.detach().clone()
            ctx.mark_dirty(x)
            return x.square_()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            return ctx.slope * g

    with pytest.raises(GradtoolsError, match="Function Squared, whose backward gives a gradient"):
        gt.grad(gt.grad(lambda x: Squared.apply(x * 1)))(_x())


WITHOUT_JVP = [case for case in CASES if case.name in ("nested", "adjoint")]


@pytest.mark.parametrize("case", WITHOUT_JVP, ids=str)
def test_a_frozen_pullback_that_loses_its_cotangents_is_refused_at_each_use(case):
    G, x = gt.frozen(case.a), _x()[None]
    slope = lambda y: gt.grad(lambda z: (y * G(z)).sum())(x).sum()
    for _ in range(2):  # what was verified once is not compared again
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(GradtoolsError, match=case.lost):
                raise AssertionError(gt.grad(slope)(x))


class _Step(torch.autograd.Function):
    """A function whose backward says None: it is constant between its steps."""

    @staticmethod
    def forward(ctx, x):
        return x.sign()

    @staticmethod
    def backward(ctx, g):
        return None


def test_what_says_that_it_is_constant_cuts_no_derivative_inside():
    def f(x):
        return _Step.apply(gt.grad(lambda x: (x**3).sum())(x)).sum()

    x = torch.tensor([1.0, 2.0], dtype=torch.float64)
    zero = torch.zeros_like(x)
    torch.testing.assert_close(gt.grad(f)(x), zero)
    torch.testing.assert_close(gt.linearize(f, x)[1](x), zero.sum())


# --- tangents that a class pushes by itself ------------------------------------------------


class PushesDetached(Right):
    @staticmethod
    def jvp(ctx: Any, t: Tensor) -> Tensor:
        return 3 * ctx.saved_tensors[0].detach() ** 2 * t


class PushesIntermediate(Right):
    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        Right.setup_context(ctx, inputs, output)
        ctx.slope = 3 * inputs[0].detach() ** 2

    @staticmethod
    def jvp(ctx: Any, t: Tensor) -> Tensor:
        return ctx.slope * t

    generate_vmap_rule = False

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> Any:
        return PushesIntermediate.apply(x), in_dims[0]


class PushesUnderNoGrad(Right):
    @staticmethod
    def jvp(ctx: Any, t: Tensor) -> Tensor:
        with torch.no_grad():
            return Right.jvp(ctx, t)


class PushesDetachedTangents(Right):
    @staticmethod
    def jvp(ctx: Any, t: Tensor) -> Tensor:
        return Right.jvp(ctx, t.detach())


PUSHING = [Right, PushesDetached, PushesIntermediate, PushesUnderNoGrad]


def _pushed_twice(f: Callable[..., Any], x: Tensor) -> dict[str, Callable[[], Any]]:
    """The derivative of x -> f'(x), of which f' is pushed along."""
    pushed = lambda x: gt.jvp(f, (x,), (torch.ones_like(x),))[1]
    slope = lambda f: gt.jacobian(f, mode="forward")

    def natively(pushed: Callable[[Tensor], Tensor]) -> Tensor:
        tracked = x.clone().requires_grad_()
        return torch.autograd.grad(pushed(tracked), tracked)[0]

    return {
        "grad of jvp": lambda: gt.grad(pushed)(x),
        "torch.autograd.grad of jvp": lambda: natively(pushed),
        "of what is captured": lambda: gt.grad(
            lambda a: gt.jvp(lambda x: f(x + a), (x,), (torch.ones_like(x),))[1]
        )(0 * x),
        "grad of forward jacobian": lambda: gt.grad(slope(f))(x),
        "jacobian of forward jacobian": lambda: gt.jacobian(slope(f))(x),
        "through vmap": lambda: gt.grad(lambda x: torch.vmap(pushed)(x[None]).sum())(x),
        "of vmap": lambda: gt.grad(
            lambda x: gt.jvp(lambda x: torch.vmap(f)(x[None])[0], (x,), (torch.ones_like(x),))[1]
        )(x),
    }


def _transposed_twice(f: Callable[..., Any], x: Tensor) -> dict[str, Callable[[], Any]]:
    """The same, where nothing is pushed along that is differentiated again."""
    pushed = lambda x: gt.jvp(f, (x,), (torch.ones_like(x),))[1]
    return {
        "jvp of jvp": lambda: gt.jvp(pushed, (x,), (torch.ones_like(x),))[1],
        "torch.func.grad of jvp": lambda: torch.func.grad(pushed)(x),
        "torch.func.jvp of jvp": lambda: torch.func.jvp(pushed, (x,), (torch.ones_like(x),))[1],
        "grad of linearize": lambda: gt.grad(lambda x: gt.linearize(f, x)[1](torch.ones_like(x)))(
            x
        ),
        "hvp": lambda: gt.hvp(f, (x,), (torch.ones_like(x),))[1][0],
    }


@pytest.mark.parametrize("kind", PUSHING)
def test_a_tangent_that_loses_its_derivative_is_refused_where_it_is_differentiated(kind):
    f = lambda x: kind.apply(x) ** 2
    for _ in range(2):
        for name, way in _pushed_twice(f, _x()).items():
            if kind is Right:
                assert float(way()) == pytest.approx(30 * X**4, rel=1e-12), name
                continue
            said = f"Function {kind.__name__}, whose jvp gives a tangent .* respect to its inputs"
            with pytest.raises(GradtoolsError, match=said):
                raise AssertionError(f"{name}: {way()}")
    for name, way in _transposed_twice(f, _x()).items():
        assert float(way()) == pytest.approx(30 * X**4, rel=1e-12), name


def test_a_third_derivative_by_a_tangent_that_loses_it_is_refused():
    def third(kind: Any) -> Tensor:
        f = lambda x: kind.apply(x) ** 2
        second = lambda x: gt.hvp(f, (x,), (torch.ones_like(x),), mode="forward_over_reverse")
        return gt.grad(lambda x: second(x)[1][0])(_x())

    assert float(third(Right)) == pytest.approx(120 * X**3)
    with pytest.raises(GradtoolsError, match="Function PushesDetached, whose jvp"):
        third(PushesDetached)


@pytest.mark.parametrize("mapped", [False, True])
def test_a_tangent_that_loses_its_derivative_along_the_tangent_is_refused(mapped):
    def along(kind: Any) -> Tensor:
        f = (lambda x: torch.vmap(kind.apply)(x[None])[0]) if mapped else kind.apply
        return gt.grad(lambda t: gt.jvp(lambda x: f(x) + x, (_x(),), (t,))[1])(_x())

    assert float(along(PushesDetached)) == pytest.approx(3 * X**2 + 1)
    with pytest.raises(GradtoolsError, match="respect to its tangents"):
        along(PushesDetachedTangents)


def test_a_tangent_that_moves_with_what_is_before_the_class_is_refused():
    pushed = lambda w: gt.jvp(lambda x: PushesDetachedTangents.apply(w * x), (_x(),), (_x(),))[1]
    with pytest.raises(GradtoolsError, match="respect to its tangents"):
        gt.grad(pushed)(_x())


def test_a_tangent_is_tried_along_all_that_is_differentiated():
    class Product(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(x, w)
            ctx.save_for_forward(x, w)
            return x**2 * w

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            x, w = ctx.saved_tensors
            return 2 * x * w * g, x**2 * g

        @staticmethod
        def jvp(ctx: Any, tx: Tensor, tw: Tensor | None) -> Tensor:
            x, w = ctx.saved_tensors
            return 2 * x * w.detach() * tx + (0 if tw is None else x**2 * tw)

    pushed = lambda x, w: gt.jvp(lambda x: Product.apply(x, w), (x,), (torch.ones_like(x),))[1]
    assert float(gt.grad(pushed)(_x(), _W)) == pytest.approx(2 * float(_W))
    with pytest.raises(GradtoolsError, match="Function Product, whose jvp"):
        gt.grad(pushed, 1)(_x(), _W)


def test_what_is_not_asked_of_a_tangent_is_not_refused():
    f = lambda x, w: (torch.sin(x) * w, PushesDetached.apply(x))
    x, one = _x(), torch.ones_like(_x())
    tangent = lambda x, w, k: gt.jvp(lambda x: f(x, w), (x,), (one,))[1][k]
    assert float(gt.grad(tangent, 0)(x, x, 0)) == pytest.approx(-np.sin(X) * X)
    assert float(gt.grad(tangent, 1)(x, x, 0)) == pytest.approx(np.cos(X))
    with pytest.raises(GradtoolsError, match="Function PushesDetached"):
        gt.grad(tangent, 0)(x, x, 1)


def test_a_tangent_alone_tries_nothing():
    calls: list[int] = []

    class Seen(PushesDetached):
        @staticmethod
        def jvp(ctx: Any, t: Tensor) -> Tensor:
            calls.append(1)
            return PushesDetached.jvp(ctx, t)

    w = torch.ones((), dtype=torch.float64, requires_grad=True)
    assert float(gt.jvp(lambda x: Seen.apply(w * x), (_x(),), (_x(),))[1]) == pytest.approx(
        3 * X**3
    )
    assert len(calls) == 1


def test_a_tangent_under_no_grad_is_a_constant():
    def f(x: Tensor) -> Tensor:
        with torch.no_grad():
            tangent = gt.jvp(Right.apply, (x,), (torch.ones_like(x),))[1]
        return tangent * x

    assert float(gt.grad(f)(_x())) == pytest.approx(3 * X**2)


def test_a_class_whose_tangent_cannot_be_tried_is_refused():
    class Gridded(PushesDetached):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            if not torch.equal(8 * x, (8 * x).round()):
                raise ValueError("off the grid")
            return x**3

    with pytest.raises(GradtoolsError, match=r"Gridded, whose tangent .* off the grid"):
        gt.grad(lambda x: gt.jvp(Gridded.apply, (x,), (x.detach(),))[1])(_x())


# --- arguments that are there for autograd's sake alone


class ReadsAModule(torch.autograd.Function):
    """The adjoint of torchdiffeq: parameters are arguments, and the module is read."""

    @staticmethod
    def forward(ctx, net, x, *params):
        ctx.net, ctx.x, ctx.params = net, x, params
        return net(x)

    @staticmethod
    def backward(ctx, ct):
        with torch.enable_grad():
            out = ctx.net(ctx.x)
        return None, None, *torch.autograd.grad(out, ctx.params, ct, allow_unused=True)


class ReadsAClosure(torch.autograd.Function):
    """The checkpoint of guided-diffusion: what is read is a function that closes over a module."""

    @staticmethod
    def forward(ctx, run, x, *params):
        ctx.run, ctx.x, ctx.params = run, x, params
        return run(x)

    @staticmethod
    def backward(ctx, ct):
        with torch.enable_grad():
            x = ctx.x.detach().requires_grad_()
            out = ctx.run(x)
        sources = (x, *ctx.params)
        return None, *torch.autograd.grad(out, sources, ct, create_graph=True, allow_unused=True)


class ReadsNothingElse(torch.autograd.Function):
    """A fused layer that is handed its module for a setting alone."""

    @staticmethod
    def forward(ctx, module, x, weight):
        ctx.save_for_backward(x, weight)
        ctx.scale = module.scale
        return x * weight * module.scale

    @staticmethod
    def backward(ctx, ct):
        x, weight = ctx.saved_tensors
        return None, ct * weight * ctx.scale, ct * x * ctx.scale


class Fused(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.scale = torch.nn.Parameter(torch.ones(2)), 2.0

    def forward(self, x):
        return ReadsNothingElse.apply(self, x, self.weight)


class InventsASlope(torch.autograd.Function):
    """y = 3 x + 1, whose constant gradient is written as a ratio of a constant and x."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return 3 * x + 1

    @staticmethod
    def backward(ctx, ct):
        (x,) = ctx.saved_tensors
        return ct * (3 * x).detach() / x


_X = torch.tensor([[1.0, 2.0]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_class_that_reads_its_arguments_in_a_module_has_its_derivatives(dtype):
    """Its backward takes a derivative without a graph: that is kept, and the number is right."""
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    net, x = net.to(dtype), _X.to(dtype)
    ones = {name: torch.ones_like(p) for name, p in net.named_parameters()}
    through = lambda net: ReadsAModule.apply(net, x, *net.parameters()).square().sum()
    for _ in range(2):  # by a trial, and by what is remembered of it
        (found,), (expected,) = (
            gt.hvp(f, (net,), (ones,))[1] for f in (through, lambda net: net(x).square().sum())
        )
        for name in ones:
            torch.testing.assert_close(found[name], expected[name])


class Recomputes(torch.autograd.Function):
    """The checkpoint of guided-diffusion, whose input is cut off in its backward."""

    @staticmethod
    def forward(ctx, run, x, *params):
        ctx.run, ctx.x, ctx.params = run, x, params
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx, ct):
        x = ctx.x.detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.run(x.view_as(x))
        return None, *torch.autograd.grad(out, (x, *ctx.params), ct, allow_unused=True)


def test_a_checkpoint_of_ones_own_is_right_at_the_weights_and_refused_at_the_input():
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    ones = {name: torch.ones_like(p) for name, p in net.named_parameters()}
    through = lambda x: lambda net: Recomputes.apply(net, x, *net.parameters()).sin().sum()
    (found,) = gt.hvp(through(_X), (net,), (ones,))[1]
    (expected,) = gt.hvp(lambda net: net(_X).sin().sum(), (net,), (ones,))[1]
    for name in ones:
        torch.testing.assert_close(found[name], expected[name])
    with pytest.raises(LostDerivativeError, match="Recomputes, whose backward"):
        gt.hvp(through(_X.clone().requires_grad_()), (net,), (ones,))
    with pytest.raises(LostDerivativeError, match="Recomputes, whose backward"):
        gt.hvp(lambda x: through(x)(net), (_X,), (_X,))


class ReadsAGlobal(ReadsAModule):
    """The same of a module that no argument holds."""

    @staticmethod
    def forward(ctx, x, *params):
        ctx.net, ctx.x, ctx.params = _NET, x, params
        return _NET(x)

    @staticmethod
    def backward(ctx, ct):
        with torch.enable_grad():
            out = ctx.net(ctx.x)
        return torch.autograd.grad(out, (ctx.x, *ctx.params), ct, allow_unused=True)


class Quantized(torch.autograd.Function):
    """A straight-through estimator, which does not read what gets its gradient."""

    @staticmethod
    def forward(ctx, x, hard):
        return hard.clone()

    @staticmethod
    def backward(ctx, ct):
        return ct, None


_NET = torch.nn.Linear(2, 1)


def test_nor_is_one_that_reads_them_in_a_closure():
    net = torch.nn.Linear(2, 1)
    loss = lambda x: ReadsAClosure.apply(lambda x: net(x), x, *net.parameters()).sin().sum()
    with pytest.raises(LostDerivativeError, match=r"ReadsAClosure.* for autograd's sake alone"):
        gt.grad(loss)(_X).square().sum().backward()


def test_nor_one_that_reads_them_elsewhere():
    loss = lambda x: ReadsAGlobal.apply(x, *_NET.parameters()).sin().sum()
    with pytest.raises(LostDerivativeError, match=r"ReadsAGlobal.* for autograd's sake alone"):
        gt.grad(loss)(_X).square().sum().backward()


class Mapped(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x**3

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, ct):
        return 3 * ctx.saved_tensors[0] ** 2 * ct


class MappedAndLost(Mapped):
    @staticmethod
    def backward(ctx, ct):
        return 3 * ctx.saved_tensors[0].detach() ** 2 * ct


def _pulled_twice(f, x):
    x = x.clone().requires_grad_()
    gt.grad(f)(x).sum().backward()
    return x.grad


@pytest.mark.parametrize("where", [torch.vmap, lambda f: gt.chunked(torch.vmap(f), 1)])
def test_under_vmap_it_is_the_class_as_it_is_written_that_is_tried(where):
    x = _X[0].double()
    total = lambda kind: lambda x: where(kind.apply)(x).sum()
    ways = {
        "hvp": lambda f: gt.hvp(f, (x,), (torch.ones_like(x),))[1][0],
        "torch.func": lambda f: torch.func.grad(lambda x: gt.grad(f)(x).sum())(x),
        "backward": lambda f: _pulled_twice(f, x),
    }
    with pytest.raises(GradtoolsError, match="a reverse rule only"):
        gt.jvp(torch.vmap(Mapped.apply), (x,), (x,))
    for name, way in ways.items():
        torch.testing.assert_close(way(total(Mapped)).detach(), 6 * x, msg=name)
        with pytest.raises(LostDerivativeError, match="MappedAndLost, whose backward"):
            raise AssertionError(f"{name}: {way(total(MappedAndLost))}")


def test_a_straight_through_estimator_that_reads_another_argument_passes():
    loss = lambda x: Quantized.apply(x, x.detach().round()).square().sum()
    torch.testing.assert_close(gt.hessian(loss)(_X[0] + 0.2), 2 * torch.eye(2))


def test_a_class_that_is_handed_its_module_for_a_setting_passes():
    layer = Fused()
    hessian = gt.hessian(lambda x: layer(x).square().sum())(torch.ones(2))
    torch.testing.assert_close(hessian.detach(), 8 * torch.eye(2))
    _, (product,) = gt.hvp(
        lambda layer: layer(_X[0]).square().sum(), (layer,), ({"weight": torch.ones(2)},)
    )
    torch.testing.assert_close(product["weight"].detach(), 8 * _X[0] ** 2)


def test_an_invented_derivative_of_a_constant_gradient_is_refused():
    with pytest.raises(LostDerivativeError, match="InventsASlope"):
        gt.hessian(lambda x: InventsASlope.apply(x).sum())(_X[0])


def test_a_class_is_tried_through_an_apply_that_was_bound_before():
    apply = InventsASlope.apply
    with pytest.raises(LostDerivativeError, match="InventsASlope"):
        gt.hessian(lambda x: apply(x).sum())(_X[0])
