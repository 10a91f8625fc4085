"""Quick compilation of what tests run, and XLA's own defaults for what they look into."""

from __future__ import annotations

import os
from importlib.metadata import version
from typing import Any

DEFAULTS: dict[str, Any] = {"xla_backend_optimization_level": 3}
QUICK: dict[str, Any] = {"xla_backend_optimization_level": 0}

# XLA ends the process over a flag that it does not know, so the version is asked. Up to here the
# older emitters of fused loops can be had, which compile several times as quickly.
if version("jaxlib").split(".")[:2] == ["0", "10"]:
    DEFAULTS["xla_cpu_use_fusion_emitters"] = True
    QUICK["xla_cpu_use_fusion_emitters"] = False


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


def _compile_by_hand_as_users_do() -> None:
    import jax

    plain = jax.stages.Lowered.compile

    def compile(self: Any, compiler_options: Any = None, **options: Any) -> Any:
        return plain(self, {**DEFAULTS, **(compiler_options or {})}, **options)

    jax.stages.Lowered.compile = compile
