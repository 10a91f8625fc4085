"""Runs JAX's tests of custom_jvp and custom_vjp, both implemented by `gt.custom_rule`.

    python benchmarks/jax_custom_api.py PATH_OF_A_JAX_CHECKOUT

The program reads `tests/custom_api_test.py` in the checkout, runs its two classes in a separate
process, and prints the numbers of tests and the reasons for failures. The replacements below adapt
the interface:

- Arguments in `nondiff_argnums` that contain arrays are passed as arguments; all other arguments in
  `nondiff_argnums` are passed as static arguments. For a custom_vjp, tracers in these arguments
  raise an error, as in JAX.
- A cotangent is J^H c in gradtools and J^T c in JAX, so complex cotangents are conjugated.
- With symbolic zeros, fwd receives JAX's `CustomVJPPrimal`s, and fwd's results are not changed.
- If JAX's test expects an error, a `GradtoolsError` with any message is accepted.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero
from jax.tree_util import tree_leaves, tree_map

import gradtools.jax as gt
from gradtools import GradtoolsError
from gradtools.rules import total

HERE = pathlib.Path(__file__)
CLASSES = ("CustomJVPTest", "CustomVJPTest")

REASONS = {
    **{
        f"Custom{kind}Test.test_symbolic_zero_custom_{kind.lower()}": "the test asserts that f is "
        "called with a Python float; custom_rule passes a weakly typed array"
        for kind in ("JVP", "VJP")
    },
    "CustomVJPTest.test_bwd_rule_shape_mismatch_disable": "the test disables shape checks with "
    "jax_disable_bwd_checks, but custom_rule always checks the shape of a cotangent",
    "CustomVJPTest.test_bwd_closes_over_tracer": "bwd closes over a differentiated array, which "
    "raises an error in both backends: pass the array as an argument",
    "CustomVJPTest.test_fwd_closes_over_tracer": "fwd closes over a differentiated array, which "
    "raises an error in both backends: pass the array as an argument",
    "CustomJVPTest.test_resolve_kwargs_error_message": "the test expects an error for a "
    "keyword-only argument, which custom_rule supports",
    "CustomVJPTest.test_resolve_kwargs_error_message": "the test expects an error for a "
    "keyword-only argument, which custom_rule supports",
    "CustomVJPTest.test_jvp_error": "the test expects an error for forward mode of a reverse rule, "
    "which custom_rule supports by transposition",
    **{
        f"Custom{kind}Test.test_dce": "the equation of a rule keeps all outputs; XLA removes "
        "unused outputs"
        for kind in ("JVP", "VJP")
    },
    **{
        f"Custom{test}": "a printed equation contains the name of the rule, not its program"
        for test in (
            "JVPTest.test_pretty_print",
            "VJPTest.test_pretty_print",
            "VJPTest.test_custom_lin_pretty_print",
        )
    },
    "CustomJVPTest.test_symbolic_zero_custom_jvp_vmap_doesnt_instantiate": "a zero tangent that a "
    "rule returns is passed to the next rule as an array of zeros",
}
"""Maps the name of each failing test to the reason for the failure."""


# --- jax.custom_jvp and jax.custom_vjp, on custom_rule ------------------------------------


class _StandIn:
    """Replaces `custom_jvp` or `custom_vjp`; defines one rule per set of nondiff array arguments.

    Attributes:
        fun: The function.
        names: The parameter names of `fun`, or [] if it has no nondiff arguments.
        apart: The positions in `nondiff_argnums`.
        given: The user's rule as (functions, options), or None before the rule is defined.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        nondiff_argnums: int | Sequence[int] = (),
        nondiff_argnames: str | Sequence[str] = (),
    ) -> None:
        functools.update_wrapper(self, fun, updated=())
        self.fun, self.given = fun, None
        numbers = [nondiff_argnums] if isinstance(nondiff_argnums, int) else list(nondiff_argnums)
        names = [nondiff_argnames] if isinstance(nondiff_argnames, str) else list(nondiff_argnames)
        self.names = list(inspect.signature(fun).parameters) if numbers or names else []
        self.apart = sorted({*numbers, *(self.names.index(n) for n in names)})
        self._rules: dict[Any, Any] = {}

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._rule(self._moved(args, kwargs))(*args, **kwargs)

    def _gives(self, *functions: Any, **options: Any) -> None:
        self.given = functions, options
        self._rules.clear()

    def _moved(self, args: Any, kwargs: Any) -> tuple[int, ...]:
        """Returns the positions in `apart` that contain arrays and are passed as arguments."""
        if not self.apart:
            return ()
        bound = inspect.signature(self.fun).bind(*args, **kwargs)
        bound.apply_defaults()
        values = [bound.arguments.get(name) for name in self.names]
        return tuple([i for i in self.apart if any(map(self.moves, tree_leaves(values[i])))])

    @staticmethod
    def moves(x: Any) -> bool:
        """Returns whether x is an array that is passed as an argument."""
        return isinstance(x, jax.Array | np.ndarray | np.generic)

    def _rule(self, moved: tuple[int, ...]) -> Any:
        if moved not in self._rules:
            static = [i for i in self.apart if i not in moved]
            rule = gt.custom_rule(self.fun, static_argnames=[self.names[i] for i in static])
            if self.given is not None:
                self.install(rule, static, moved)
            self._rules[moved] = rule
        return self._rules[moved]

    def install(self, rule: Any, static: list[int], moved: tuple[int, ...]) -> None:
        """Passes the user's rule to `gt.custom_rule`."""
        raise NotImplementedError

    @staticmethod
    def in_order(static: list[int], values: Sequence[Any]) -> list[Any]:
        """Returns the arguments by position; in `values`, static arguments come first."""
        led, rest = iter(values[: len(static)]), iter(values[len(static) :])
        return [next(led) if i in static else next(rest) for i in range(len(values))]


def _named(fun: Any, of: Any) -> Any:
    fun.__name__ = getattr(of, "__name__", type(of).__name__)
    return fun


class custom_jvp(_StandIn):
    """Replaces `jax.custom_jvp`."""

    jvp: Any = None

    def defjvp(self, jvp: Any, symbolic_zeros: bool = False) -> Any:
        """Defines the rule, as `jax.custom_jvp.defjvp` does."""
        self.jvp = jvp
        self._gives(jvp, symbolic=symbolic_zeros)
        return jvp

    def defjvps(self, *jvps: Any) -> None:
        """Defines one rule for each argument, as `jax.custom_jvp.defjvps` does."""
        self.jvp = jvps
        self._gives(*jvps, symbolic=None)

    def install(self, rule: Any, static: list[int], moved: tuple[int, ...]) -> None:
        """Passes the user's rule to `gt.custom_rule`."""
        jvps, options = self.given
        symbolic, (jvp, *_) = options["symbolic"], jvps
        if symbolic is None:  # one rule for each argument

            def summed(*args: Any) -> Any:
                *statics, primals, tangents = args
                out = rule._binding.call(rule, statics, primals)
                terms = zip(jvps, tangents, strict=True)
                return out, total(
                    f(*statics, t, out, *primals) for f, t in terms if f and t is not None
                )

            rule.defjvp(summed)
            return
        if not self.apart and not symbolic:
            rule.defjvp(jvp)
            return

        def run(*args: Any) -> Any:
            *led, primals, tangents = args
            xs = self.in_order(static, (*led, *primals))
            dxs = self.in_order(static, (*[None] * len(static), *tangents))
            every = [i for i in range(len(xs)) if i not in self.apart]
            ts = [tree_map(_zero_for, xs[i], dxs[i]) if symbolic else dxs[i] for i in every]
            return jvp(*[xs[i] for i in self.apart], tuple([xs[i] for i in every]), tuple(ts))

        rule.defjvp(_named(run, jvp), symbolic_zeros=symbolic)


def _tangent_type(x: Any) -> Any:
    return jax.typeof(x).to_tangent_aval()


def _zero_for(x: Any, dx: Any) -> Any:
    return SymbolicZero(_tangent_type(x)) if dx is None else dx


class custom_vjp(_StandIn):
    """Replaces `jax.custom_vjp`."""

    fwd: Any = None
    bwd: Any = None

    def defvjp(
        self, fwd: Any, bwd: Any, symbolic_zeros: bool = False, optimize_remat: bool = False
    ) -> None:
        """Defines the rule, as `jax.custom_vjp.defvjp` does."""
        self.fwd, self.bwd = fwd, bwd
        self._gives(fwd, bwd, symbolic=symbolic_zeros, remat=optimize_remat)

    @staticmethod
    def moves(x: Any) -> bool:
        """Returns whether x is an array (but not a tracer) that is passed as an argument."""
        return _StandIn.moves(x) and not isinstance(x, jax.core.Tracer)

    def install(self, rule: Any, static: list[int], moved: tuple[int, ...]) -> None:
        """Passes the user's rule to `gt.custom_rule`."""
        (fwd, bwd), options = self.given
        symbolic, outs = options["symbolic"], {}

        def run_forward(*args: Any) -> Any:
            xs = self.in_order(static, args)
            told = [tree_map(_told, x, is_leaf=_is_told) for x in xs] if symbolic else xs
            result = fwd(*told)
            if symbolic:
                outs["types"] = tree_map(_tangent_type, result[0])
            return (result[0], (result[1], [xs[i] for i in moved])) if moved else result

        def run_backward(*args: Any) -> Any:
            *led, res, ct = args
            known = dict(zip(static, led, strict=True))
            if moved:
                res, values = res
                known |= dict(zip(moved, values, strict=True))
            if symbolic:
                ct = tree_map(_zero_of, outs["types"], ct)
            cts = _conjugated(bwd(*[known[i] for i in self.apart], res, _conjugated(ct)))
            if not moved:
                return cts
            left, count = iter(cts), len(cts) + len(self.apart)
            return tuple(
                [None if i in moved else next(left) for i in range(count) if i not in static]
            )

        given = run_forward if self.apart or symbolic else fwd
        rule.defvjp(
            _named(given, fwd) if given is run_forward else fwd,
            _named(run_backward, bwd),
            symbolic_zeros=symbolic,
            optimize_remat=options["remat"],
        )


def _is_told(x: Any) -> bool:
    return hasattr(x, "perturbed")


def _told(x: Any) -> Any:
    return CustomVJPPrimal(x.value, x.perturbed) if _is_told(x) else x


def _zero_of(kind: Any, ct: Any) -> Any:
    return SymbolicZero(kind) if ct is None else ct


def _conjugated(tree: Any) -> Any:
    def one(x: Any) -> Any:
        complex_one = _StandIn.moves(x) and jnp.issubdtype(x.dtype, jnp.complexfloating)
        return jnp.conj(x) if complex_one else x

    return tree_map(one, tree, is_leaf=lambda x: isinstance(x, SymbolicZero))


# --- JAX's tests with the messages of gradtools -------------------------------------------


class _Raised:
    """Expects an error whose message matches `regex`, or a `GradtoolsError` with any message."""

    def __init__(self, inner: Any, regex: str) -> None:
        self.inner, self.regex = inner, regex

    def __enter__(self) -> Any:
        return self.inner.__enter__()

    def __exit__(self, *error: Any) -> Any:
        met = self.inner.__exit__(*error)
        if met and not isinstance(self.inner.exception, GradtoolsError):
            said = str(self.inner.exception)
            assert re.search(self.regex, said), f"{self.regex!r} does not match {said!r}"
        return met


def _or_ours(expected: Any) -> tuple[Any, ...]:
    return (*(expected if isinstance(expected, tuple) else (expected,)), GradtoolsError)


class _InOurWords(unittest.TestCase):
    def assertRaises(self, expected: Any, *args: Any, **kwargs: Any) -> Any:
        raises = unittest.TestCase.assertRaises
        return raises(self, _or_ours(expected), *args, **kwargs)

    def assertRaisesRegex(self, expected: Any, regex: Any, *args: Any, **kwargs: Any) -> Any:
        raises = self.assertRaises
        context = _Raised(raises(expected), regex)
        if not args:
            return context
        with context:
            args[0](*args[1:], **kwargs)
        return None


def _suite(path: str) -> unittest.TestSuite:
    sys.argv = sys.argv[:1]
    jax.custom_jvp, jax.custom_vjp = custom_jvp, custom_vjp
    jax.custom_derivatives.custom_jvp = custom_jvp
    jax.custom_derivatives.custom_vjp = custom_vjp
    spec = importlib.util.spec_from_file_location("custom_api_test", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    suite = unittest.TestSuite()
    for name in CLASSES:
        kind = type(name, (_InOurWords, getattr(module, name)), {})
        suite.addTests(unittest.defaultTestLoader.loadTestsFromTestCase(kind))
    return suite


def _outcomes(path: str) -> dict[str, str]:
    """Maps the name of each test to "passed", "skipped" or the last line of the error."""
    from absl import flags

    flags.FLAGS([sys.argv[0]])
    suite = _suite(path)
    names = [_name(test) for test in _every(suite)]
    result = unittest.TextTestRunner(stream=open(os.devnull, "w")).run(suite)  # noqa: SIM115
    found = dict.fromkeys(names, "passed")
    found |= {_name(test): "skipped" for test, _ in result.skipped}
    for test, said in (*result.failures, *result.errors):
        found[_name(test)] = said.strip().splitlines()[-1]
    return found


def _every(suite: Any) -> Iterator[Any]:
    for test in suite:
        yield from _every(test) if isinstance(test, unittest.TestSuite) else [test]


def _name(test: Any) -> str:
    return f"{type(test).__name__}.{test._testMethodName}"


# --- the table ----------------------------------------------------------------------------


def _run(path: str) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "outcomes.json"
        subprocess.run([sys.executable, str(HERE), path, str(out)], check=True)
        return json.loads(out.read_text(encoding="utf-8"))


def table(outcomes: dict[str, str]) -> str:
    """Returns a page with the numbers of tests, and with the reasons for the failures."""
    skipped = [n for n, o in outcomes.items() if o == "skipped"]
    passed = [n for n, o in outcomes.items() if o == "passed"]
    rest = [n for n in outcomes if n not in {*skipped, *passed}]
    lines = [
        f"# JAX's tests of custom_jvp and custom_vjp, run with custom_rule, jax {jax.__version__}",
        "",
        "| tests | all | skipped by JAX | passed | failed |",
        "|---|---|---|---|---|",
        f"| custom_api_test.py | {len(outcomes)} | {len(skipped)} | {len(passed)} | {len(rest)} |",
        *["", "These tests fail:", "", "| test | reason |", "|---|---|"],
    ]
    lines += [f"| {n} | {REASONS.get(n, 'not known: ' + outcomes[n])} |" for n in sorted(rest)]
    return "\n".join(lines) + "\n"


def main() -> None:
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    path = pathlib.Path(sys.argv[1])
    path = path / "tests" / "custom_api_test.py" if path.is_dir() else path
    if len(sys.argv) == 3:
        out = pathlib.Path(sys.argv[2])
        out.write_text(json.dumps(_outcomes(str(path))), encoding="utf-8")
        return
    text = table(_run(str(path)))
    print(text)
    (HERE.parent / "results" / "jax_custom_api.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
