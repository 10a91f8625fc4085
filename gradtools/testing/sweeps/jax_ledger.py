"""What is known not to agree in the sweep over JAX, and why."""

from __future__ import annotations

import jax

from gradtools.testing.sweeps import LEFT_OUT, Known
from gradtools.testing.sweeps.jax_programs import WRITTEN_FOR

LEDGER: tuple[Known, ...] = ()


def lines() -> tuple[Known, ...]:
    """The ledger; for a later JAX than the table was written for, with a line for new names."""
    if jax.__version_info__ <= WRITTEN_FOR:
        return LEDGER
    return (*LEDGER, Known("*", "table", LEFT_OUT, "newer than the table of arguments"))
