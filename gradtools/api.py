"""Defines the table of public operators, whose modules are imported lazily.

`Api(backend)` binds the operators to a backend; the namespaces `gradtools.torch` and
`gradtools.jax` export its methods. A module is imported when one of its operators is first
accessed.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from gradtools.backend import Operators

_OPERATORS = {
    "derivatives:Derivatives": (
        "grad value_and_grad minimax_value_and_grad vjp jvp linearize per_example_grad"
    ),
    "jacobians:Jacobians": "jacobian hvp hessian",
    "mixed_partials:MixedPartials": "mixed_partial",
    "edits:Edits": (
        "reverse_gradient scale_gradient stop_gradient clip_gradient transform_gradient "
        "replace_gradient straight_through"
    ),
    "implicit:Implicit": "implicit_solution",
    "intermediate_gradients:RetainedGradients": "retain_gradient retained_gradients",
    "custom_rules:CustomRules": "custom_rule",
    "host_functions:HostFunctions": "host_function ArraySpec",
    "freezing:Freezing": "frozen",
    "chunking:Chunking": "chunked microbatched_value_and_grad is_recomputing",
    "gathering:Gathering": "all_gather",
    "accumulate:Accumulation": "GradientAccumulator accumulate_gradients assign_gradients",
    "models:Models": "make_functional",
    "arrays:ArraysAndKeys": "xp asarray to_numpy random_key split_key",
    "transforms:Transforms": "vmap checkpoint compile",
    "seeing.diagnostics.zero_gradients:SeeingOperators": "why_zero",
    "seeing.graphs.gradient_graphs:Graphing": "gradient_graph",
    "seeing.formulas.formulating:Formulating": "formula",
}
_INSTEAD = {
    "minimax": "minimax_value_and_grad(f, minimize, maximize)",
    "jacrev": 'jacobian(f, mode="reverse")',
    "jacfwd": 'jacobian(f, mode="forward")',
    "grad_and_value": "value_and_grad(f), which returns (value, grads)",
    "custom_vjp": "custom_rule(f), then f.defvjp(fwd, bwd)",
    "custom_jvp": "custom_rule(f), then f.defjvp(rule)",
    "remat": "checkpoint(f)",
    "jit": "compile(f)",
    "nn": "gradtools.jax.linen, gradtools.jax.nnx or gradtools.jax.equinox",
    "pure_callback": "host_function(kernel)",
    "to_jax": "gradtools.bridge.to_jax(f)",
    "to_torch": "gradtools.bridge.to_torch(f)",
}
_PATH_OF = {
    name: f"gradtools.{path}" for path, names in _OPERATORS.items() for name in names.split()
}


def no_attribute(module: str, name: str) -> AttributeError:
    """Returns an AttributeError for an unknown name, with a replacement if `_INSTEAD` has one."""
    more = f". Write {_INSTEAD[name]}." if name in _INSTEAD else ""
    text = f"module {module!r} has no attribute {name!r}{more}"
    # with `name` and `obj`, Python adds "Did you mean" if a similar name exists
    return AttributeError(text, name=name, obj=sys.modules.get(module))


class Api(Operators):
    """Every public operator, bound to one backend."""

    names = sorted(_PATH_OF)

    def __getattr__(self, name: str) -> Any:
        if name not in _PATH_OF:
            raise no_attribute(f"gradtools.{self._backend.name}", name)
        operator = getattr(self.operators(_PATH_OF[name]), name)
        setattr(self, name, operator)
        return operator

    def operators(self, path: str) -> Operators:
        """Returns the only instance of the `Operators` subclass at the path "module:class"."""
        module, _, kind = path.partition(":")
        made = getattr(import_module(module), kind)(self._backend)
        return self.__dict__.setdefault(path, made)
