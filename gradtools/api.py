"""The public operators, collected. Each is documented where it is written.

`Api(backend)` binds them to a backend; the namespaces `gradtools.torch` and `gradtools.jax`
export its methods under their names. A room is imported when one of its operators is first read.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from gradtools.backend import Operators

_ROOMS = {
    "derivatives:Derivatives": (
        "grad value_and_grad minimax_value_and_grad vjp jvp linearize jacobian hvp hessian "
        "per_example_grad mixed_partial"
    ),
    "taylor:Taylor": "jet laplacian",
    "edits:Edits": (
        "reverse_gradient scale_gradient stop_gradient clip_gradient transform_gradient "
        "replace_gradient straight_through"
    ),
    "custom_rules:CustomRules": "custom_rule",
    "host_functions:HostFunctions": "host_function ArraySpec",
    "freezing:Freezing": "frozen",
    "chunking:Chunking": "chunked microbatched_value_and_grad all_gather is_recomputing",
    "pairwise.pairwise_reduction:Tiling": "pairwise_reduce",
    "pairwise.contrastive_losses:ContrastiveLoss": "contrastive_loss",
    "pairwise.cross_entropy:LinearCrossEntropy": "linear_cross_entropy",
    "pairwise.tiled_attention:Attention": "attention",
    "accumulate:Accumulation": "GradientAccumulator accumulate_gradients assign_gradients",
    "models:Models": (
        "make_functional xp asarray to_numpy random_key split_key vmap checkpoint compile"
    ),
    "seeing.diagnostics.zero_gradients:SeeingOperators": "dependence why_zero guard_gradients",
    "seeing.graphs.gradient_graphs:Graphing": "gradient_graph",
    "seeing.formulas.formulating:Formulating": "formula",
    "seeing.measures:Measures": "measure",
}
_GONE = {"graph_diff": "`gradtools.testing.first_divergence` says where two ports of a model part."}
_INSTEAD = {
    "gather": "all_gather(x)",
    "key": "random_key(seed)",
    "split": "split_key(key, n)",
    "functionalize": "make_functional(module)",
    "known_gradient": "replace_gradient(x, dx)",
    "tiled": "pairwise_reduce(f)",
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
_ROOM_OF = {name: f"gradtools.{room}" for room, names in _ROOMS.items() for name in names.split()}


def no_attribute(module: str, name: str) -> AttributeError:
    """The error of an unknown public name, or of one that is gone."""
    more = f". It is gone: {_GONE[name]}" if name in _GONE else ""
    more = more or (f". Write {_INSTEAD[name]}." if name in _INSTEAD else "")
    text = f"module {module!r} has no attribute {name!r}{more}"
    # with these Python itself adds "Did you mean" where a name is close to another
    return AttributeError(text, name=name, obj=sys.modules.get(module))


class Api(Operators):
    """Every public operator, bound to one backend."""

    names = sorted(_ROOM_OF)

    def __getattr__(self, name: str) -> Any:
        if name not in _ROOM_OF:
            raise no_attribute(f"gradtools.{self._backend.name}", name)
        result = getattr(self.room(_ROOM_OF[name]), name)
        setattr(self, name, result)
        return result

    def room(self, name: str) -> Operators:
        """The operators of one room, "module:class"; always the same object."""
        module, _, kind = name.partition(":")
        made = getattr(import_module(module), kind)(self._backend)
        return self.__dict__.setdefault(name, made)
