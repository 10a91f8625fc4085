"""Defines the supported framework versions, which are checked when a backend is imported."""

import os
import re

SUPPORTED = {"torch": ("2.8", "2.16"), "jax": ("0.7.2", "0.13")}
"""Maps each framework to the oldest supported and the first unsupported newer version.

The extras in pyproject.toml require the same ranges, as `tests/house/test_versions.py` checks.
"""

ANY_VERSION = "GRADTOOLS_ANY_VERSION"
"""The name of the environment variable that disables the check, for tests with nightly builds."""


def check_version(package: str, version: str) -> None:
    """Raises an error if a framework's version is outside of the supported range.

    Args:
        package: The framework's name, ``"torch"`` or ``"jax"``.
        version: The framework's ``__version__``, for example ``"2.13.0+cpu"``.

    Raises:
        ImportError: The version is not supported. The message names the supported range.
    """
    oldest, too_new = SUPPORTED[package]
    if _release(oldest) <= _release(version) < _release(too_new) or os.environ.get(ANY_VERSION):
        return
    raise ImportError(
        f"gradtools.{package} supports {package}>={oldest},<{too_new} and found {package} "
        f"{version}; install a supported version with pip install 'gradtools[{package}]', or "
        f"set {ANY_VERSION}=1 to try this version.",
        name=f"gradtools.{package}",
    )


def _release(version: str) -> tuple[int, ...]:
    """Returns the release number without trailing zeros, also for a pre-release version."""
    numbers = re.match(r"\d+(?:\.\d+)*", version)
    parts = [int(part) for part in numbers.group().split(".")] if numbers else []
    while parts and parts[-1] == 0:
        parts.pop()
    return tuple(parts)
