"""Quick compilation of what tests run, and XLA's own defaults for what they look into.

JAX also makes a compiler's context for each program, which takes as long as all the rest of a
small one's lowering. A context keeps nothing of a program but what two programs may share, so
here one serves many.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

DEFAULTS: dict[str, Any] = {"xla_backend_optimization_level": 3}
QUICK: dict[str, Any] = {"xla_backend_optimization_level": 0}

# XLA ends the process over a flag that it does not know, so the version is asked. Up to here the
# older emitters of fused loops can be had, which compile several times as quickly.
if version("jaxlib").split(".")[:2] == ["0", "10"]:
    DEFAULTS["xla_cpu_use_fusion_emitters"] = True
    QUICK["xla_cpu_use_fusion_emitters"] = False


def keep_compiled(folder: Path) -> None:
    """Programs compiled once are there for every worker, subprocess and later run.

    Read before JAX is imported; what is set already is stronger. Programs that hold a network's
    weights as constants are megabytes each; they are dropped at the next run.
    """
    for entry in folder.glob("*-cache"):
        with suppress(FileNotFoundError):  # another worker was quicker
            if entry.stat().st_size > 1_000_000:
                entry.unlink()
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


def compile_quickly() -> None:
    """Switches optimisation off, but for programs that are compiled by hand.

    XLA reads its flags once, before the first program; subprocesses inherit them. Flags that are
    set already are stronger.
    """
    if os.environ.get("GRADTOOLS_TEST_OPTIMIZED"):
        return
    flags = " ".join(f"--{name}={str(value).lower()}" for name, value in QUICK.items())
    given = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} {given}" if flags not in given else given
    _compile_by_hand_as_users_do()
    _reuse_contexts()


def _compile_by_hand_as_users_do() -> None:
    import jax

    plain = jax.stages.Lowered.compile

    def compile(self: Any, compiler_options: Any = None, **options: Any) -> Any:
        return plain(self, {**DEFAULTS, **(compiler_options or {})}, **options)

    jax.stages.Lowered.compile = compile


def _reuse_contexts(uses: int = 64) -> None:
    """Each thread takes a new context after so many programs: its constants are freed with it."""
    from jax._src.interpreters import mlir  # a public name there is none

    fresh, kept = mlir.make_ir_context, threading.local()

    def make_ir_context() -> Any:
        if mlir.ir.Context.current is not None:  # a lowering that runs a program has its own
            return fresh()
        if not getattr(kept, "left", 0):
            kept.context, kept.left = fresh(), uses
        kept.left -= 1
        return kept.context

    mlir.make_ir_context = make_ir_context
