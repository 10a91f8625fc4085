"""Everything that this wing relies on and JAX does not document: the one room that may.

`jax._src` is used nowhere: what is needed stands in `jax.extend` and `jax.interpreters`. What is
left are fields of records (an equation's source, a jaxpr's origin) that only pictures, formulas
and messages read, and one name of a method. All were seen with JAX 0.10.2; each entry says what to
do when it is gone. `tests/test_jax_upstream.py` holds that each still does what is relied on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax


def stack_of(eqn: Any) -> Sequence[Any]:
    """The stack that made an equation, innermost first, up to where JAX began to trace.

    `jax.extend.source_info_util` has `summarize`, one line of text. Gone: findings have no line.
    """
    traceback = getattr(getattr(eqn, "source_info", None), "traceback", None)
    return traceback.frames if traceback is not None else ()


def scopes_of(eqn: Any) -> Iterator[tuple[str, bool]]:
    """The names around an equation, outermost first, and whether each is a `jax.named_scope`.

    The others are transforms: "transpose", "jvp", "vmap". Gone: pictures have no modules, and
    `gradient_graph` cannot tell the passes from each other, which it then refuses.
    """
    for entry in eqn.source_info.name_stack.stack:
        yield getattr(entry, "name", ""), type(entry).__name__ == "Scope"


def name_of(jaxpr: Any) -> str:
    """The name of the function behind a jaxpr. Gone: pictures say the primitive's name."""
    return str(getattr(getattr(jaxpr, "debug_info", None), "func_name", "") or "")


def file_of(jaxpr: Any) -> str:
    """The file and line of the function behind a jaxpr, if known. Gone: it counts as users'."""
    info = getattr(jaxpr, "debug_info", None)
    return str(getattr(info, "func_src_info", None)).partition(" at ")[2]


def is_of_random(jaxpr: Any) -> bool:
    """Whether a jaxpr is of a function of `jax.random`: a formula writes its draw as a letter.

    Gone: it writes out how the bits are made.
    """
    return "/jax/_src/random" in file_of(jaxpr).replace("\\", "/")


class Tracer(jax.core.Tracer):  # type: ignore[misc]
    """A tracer of ours. Gone: JAX's own text of where it was made, which names JAX's internals."""

    def _origin_msg(self) -> str:
        return ""
