"""Compiles test programs quickly, but with XLA's defaults if a test inspects the program.

JAX creates an MLIR context for each program, which takes as long as the rest of the lowering
of a small program. A context stores only objects that programs can share, so this module uses one
context for many programs.
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

# XLA aborts the process on an unknown flag, so the version is checked. jaxlib 0.10 still has the
# older emitters of fused loops, which compile several times as fast.
if version("jaxlib").split(".")[:2] == ["0", "10"]:
    DEFAULTS["xla_cpu_use_fusion_emitters"] = True
    QUICK["xla_cpu_use_fusion_emitters"] = False


def keep_compiled(folder: Path) -> None:
    """Store compiled programs for all workers, subprocesses and later runs.

    JAX reads these settings at import, and existing settings take precedence. Programs with a
    network's weights as constants are several megabytes each; the next run deletes them.
    """
    for entry in folder.glob("*-cache"):
        with suppress(FileNotFoundError):  # another worker has already deleted the file
            if entry.stat().st_size > 1_000_000:
                entry.unlink()
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


def compile_quickly() -> None:
    """Disable optimization except for programs that are compiled ahead of time.

    XLA reads its flags once, before the first program, and subprocesses inherit them. Existing
    flags take precedence.
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
    """Give each thread a new context after `uses` programs, which frees the old constants."""
    from jax._src.interpreters import mlir  # the function has no public name

    fresh, kept = mlir.make_ir_context, threading.local()

    def make_ir_context() -> Any:
        # a program that is lowered during another lowering needs its own context
        if mlir.ir.Context.current is not None:
            return fresh()
        if not getattr(kept, "left", 0):
            kept.context, kept.left = fresh(), uses
        kept.left -= 1
        return kept.context

    mlir.make_ir_context = make_ir_context
