"""What the frameworks themselves cannot put together, and how they say so.

A random composition may ask for what no library can give: then it must be refused in words, never
answered with a wrong number. Each entry names the refusal, what must occur in the program for it
to be one, and the reason. Any other exception is a defect.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tests.support.strategies.program import REVERSE_ONLY, Composition


@dataclass(frozen=True)
class Limit:
    """One refusal.

    Attributes:
        backend: Whose it is.
        needs: Operations or operators of which one occurs in the program.
        says: A pattern in the text of the error.
        reason: Why it cannot be.
    """

    backend: str
    needs: tuple[str, ...]
    says: str
    reason: str

    def explains(self, program: Composition, error: str, backend: str) -> bool:
        """Whether this is why the program is refused."""
        occurs = set(self.needs) & {*program.operators(), *(["compiled"] * program.compiled)}
        return backend == self.backend and bool(occurs) and re.search(self.says, error) is not None


_EDITS = ("transform", *REVERSE_ONLY)
_REVERSE_ONLY = "a cotangent that is edited by any function has no forward mode"
_HOOKS = "torch.func does not support the saved-tensor hooks of checkpoint (pytorch#122729)"
_ESCAPED = "PyTorch's checkpoint cannot compute again what was computed under vmap (pytorch#165880)"
_MIDST = "PyTorch's checkpoint computes again without the tangents of f's own forward mode"
_AGAIN = "PyTorch's checkpoint computes again without the tangents, and says so"
_COMPILED = "a compiled function in PyTorch has neither forward mode nor torch.func's transforms"
_SHARED = "torch.func.jvp takes no argument whose entries share memory"
_NESTED = "torch.func.jvp does not nest in dual numbers, which gt.jvp is made of"

LIMITS = (
    Limit("torch", _EDITS, "has a reverse rule only|must implement the jvp", _REVERSE_ONLY),
    Limit(
        "jax",
        _EDITS,
        "can't apply forward-mode|reverse rule only|rule for 'custom_lin' not implemented",
        _REVERSE_ONLY,
    ),
    Limit("torch", ("gt.checkpoint",), "don't yet support saved tensor hooks", _HOOKS),
    Limit("torch", ("gt.checkpoint",), "escaped from inside a function being vmapped", _ESCAPED),
    Limit("torch", ("gt.checkpoint",), "^This program raises GradtoolsError: checkpoint: ", _MIDST),
    Limit("torch", ("gt.checkpoint",), "number of tensors was saved during", _AGAIN),
    Limit("torch", ("native.jvp",), "written-to tensor refers to a single memory", _SHARED),
    Limit("torch", ("native.jvp",), "do not nest in the dual numbers", _NESTED),
    Limit("torch", ("compiled",), "must implement the jvp function", _COMPILED),
    Limit("torch", ("compiled",), "compiled backward function within vmap", _COMPILED),
)


def limit_of(program: Composition, error: str, backend: str) -> Limit | None:
    """The limit that explains why a program is refused, or None: then it is a defect."""
    return next((limit for limit in LIMITS if limit.explains(program, error, backend)), None)
