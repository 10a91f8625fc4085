"""Reads the parameters of models as NumPy arrays, and normalizes parameter names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gradtools.arguments.wording import with_article
from gradtools.errors import GradtoolsError
from gradtools.testing.cross_checking.sides import library

Path = tuple[Any, ...]
CALLER = "match_parameters"
_COLLECTIONS = ("params", "batch_stats")
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
_EXPECTED = {
    "PyTorch": "a torch.nn.Module or a dictionary from names to arrays",
    "JAX": "the variables of flax.linen, an nnx.Module or State, an equinox.Module, or nested "
    "dictionaries of arrays",
}


def read_torch(caller: str, params: Any) -> dict[str, np.ndarray]:
    """Converts a module, a state_dict or a dictionary to NumPy arrays that are keyed by name."""
    if hasattr(params, "state_dict"):
        params = params.state_dict()
    if not isinstance(params, Mapping):
        raise not_parameters(caller, "PyTorch", params)
    return {str(name): as_numpy(x) for name, x in params.items()}


def not_parameters(caller: str, framework: str, params: Any) -> GradtoolsError:
    """Returns the error for an object that is no model or parameters of a framework."""
    came, hint = with_article(type(params).__name__), ""
    if kind := library(params):
        came = f"the {kind} module {type(params).__name__}"
    if kind not in (None, "flax.linen") and caller == CALLER:
        hint = " Are the arguments swapped? Call match_parameters(torch_model, jax_model)."
    if kind == "flax.linen" and framework == "JAX":
        hint = " Pass module.init(key, *args), or the pair (module, variables)."
    return GradtoolsError(
        f"{caller}: expected {framework}'s parameters, {_EXPECTED[framework]}; got {came}.{hint}"
    )


def read_jax(caller: str, params: Any) -> dict[Path, np.ndarray]:
    """Converts linen variables, nnx or equinox modules, or dicts to NumPy arrays keyed by path."""
    import jax

    if isinstance(params, tuple) and len(params) == 2 and isinstance(params[1], Mapping):
        params = params[1]  # a linen model as (module, variables)
    if library(params) == "equinox":
        import equinox

        params = equinox.filter(params, equinox.is_inexact_array)
    elif library(params) == "flax.nnx":
        from flax import nnx

        params = nnx.state(params, nnx.Any(nnx.Param, nnx.BatchStat))
    elif not isinstance(params, Mapping) and not hasattr(params, "to_pure_dict"):
        raise not_parameters(caller, "JAX", params)
    return {path_of(keys): as_numpy(x) for keys, x in jax.tree.leaves_with_path(params)}


def path_of(keys: Sequence[Any]) -> Path:
    """Converts JAX's key path to names, indices and keys, without nnx's final key `value`."""
    values = lambda key: (getattr(key, name, None) for name in ("name", "idx", "key"))
    path = tuple(next(v for v in values(key) if v is not None) for key in keys)
    return path[:-1] if path[-1:] == ("value",) else path


def as_numpy(x: Any) -> np.ndarray:
    """Converts an array of either framework to a NumPy array."""
    return np.asarray(x.detach().cpu().numpy() if hasattr(x, "detach") else x)


# --- names


def without_collection(path: Sequence[Any]) -> Path:
    """Removes the name of a flax collection, such as "params", from a path."""
    return tuple(path[1:]) if path and path[0] in _COLLECTIONS else tuple(path)


def name_key(parts: Sequence[Any]) -> tuple[str, ...]:
    """Returns a normalized name: lower-case letters, with numbers as separate parts."""
    text = ".".join(map(str, parts)).lower()
    words = re.sub(r"(?<=[a-z])[^a-z\d]+(?=[a-z])", "", text)
    return tuple(re.findall(r"[a-z]+|\d+", words))


def natural_key(path: Path) -> list[tuple[int, Any]]:
    """Returns a natural sort key: Dense_2 precedes Dense_10."""
    parts = re.findall(r"\d+|\D+", ".".join(map(str, path)))
    return [(0, int(part)) if part.isdigit() else (1, part) for part in parts]


def joined(path: Sequence[Any]) -> str:
    """Joins the parts of a path with "."."""
    return ".".join(map(str, path))


def split_name(name: str) -> tuple[str, ...]:
    """Splits a module's name at each "." or "/"."""
    return tuple(name.replace("/", ".").split(".")) if name else ()
