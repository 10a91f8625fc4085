"""The table of public operators, which are imported lazily.

`Api(backend)` binds them to a backend; the namespaces `gradtools.torch` and `gradtools.jax` export
its methods. A module is imported when one of its operators is first accessed.
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
_GONE = {
    "attention": "call the framework's scaled_dot_product_attention or dot_product_attention.",
    "contrastive_loss": "compute the loss with chunked over the rows of queries.",
    "dependence": "ask why_zero, which names the lines at which a gradient is lost.",
    "graph_diff": "call gradtools.testing.first_divergence.",
    "guard_gradients": 'pass disconnected_inputs="strict" to grad or value_and_grad.',
    "jet": "nest grad or jvp, or call jax.experimental.jet in JAX.",
    "laplacian": "take the trace of jacobian(grad(f)), or sum over hvp.",
    "linear_cross_entropy": "compute the loss with chunked over the tokens.",
    "measure": (
        "count with torch.utils.flop_counter and torch.profiler, or with XLA's cost_analysis."
    ),
    "pairwise_reduce": "compute the reduction with chunked over the rows.",
}
_INSTEAD = {
    "gather": "all_gather(x)",
    "key": "random_key(seed)",
    "split": "split_key(key, n)",
    "functionalize": "make_functional(module)",
    "known_gradient": "replace_gradient(x, dx)",
    "microbatched": "microbatched_value_and_grad(f, chunk_size)",
    "is_replaying": "is_recomputing()",
    "Spec": "ArraySpec(shape, dtype)",
    "minimax": "minimax_value_and_grad(f, minimize, maximize)",
    "jacrev": 'jacobian(f, mode="reverse")',
    "jacfwd": 'jacobian(f, mode="forward")',
    "grad_and_value": "value_and_grad(f), which returns (value, grads)",
    "custom_vjp": "custom_rule(f), then f.defvjp(fwd, bwd)",
    "custom_jvp": "custom_rule(f), then f.defjvp(rule)",
    "remat": "checkpoint(f)",
    "jit": "compile(f)",
    "pure_callback": "host_function(kernel)",
}
_PATH_OF = {
    name: f"gradtools.{path}" for path, names in _OPERATORS.items() for name in names.split()
}


def no_attribute(module: str, name: str) -> AttributeError:
    """The error of an unknown public name, with the name to write instead if there is one."""
    more = f". It was withdrawn: {_GONE[name]}" if name in _GONE else ""
    more = more or (f". Write {_INSTEAD[name]}." if name in _INSTEAD else "")
    text = f"module {module!r} has no attribute {name!r}{more}"
    # with name and obj Python adds "Did you mean" if a similar name exists
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
        """The `Operators` object at "module:class", made once."""
        module, _, kind = path.partition(":")
        made = getattr(import_module(module), kind)(self._backend)
        return self.__dict__.setdefault(path, made)
