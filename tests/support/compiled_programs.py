"""Defines a fixture that caches compiled JAX programs in a folder, for repeated programs.

A test file uses the fixture with `pytest_plugins` and `usefixtures("compiled_programs_kept")`. Each
test defines new functions, which JAX traces again, but many of the traced programs are equal. Each
test process has one folder for all of its test files.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from gradtools.testing.plugin import wanted_backends


@pytest.fixture(scope="module")
def compiled_programs_kept(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    if "jax" not in wanted_backends(request.config):
        yield
        return
    folder = tmp_path_factory.getbasetemp() / "compiled-programs"
    with programs_kept(str(folder)):
        yield


@contextmanager
def programs_kept(folder: str) -> Iterator[None]:
    """Enable JAX's persistent compilation cache in a folder, unless a cache is already enabled.

    Programs that are traced again for each test, such as loops, are often equal to earlier
    programs. JAX does not cache programs that call back into Python.
    """
    import jax

    before = {name: getattr(jax.config, name) for name in _KEEP}
    if before["jax_compilation_cache_dir"]:
        yield
        return
    _configure({**_KEEP, "jax_compilation_cache_dir": folder})
    try:
        yield
    finally:
        _configure(before)


_KEEP: dict[str, Any] = {
    "jax_compilation_cache_dir": None,
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}


def _configure(values: dict[str, Any]) -> None:
    """Set JAX's options and reset its compilation cache, which reads them only once."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    for name, value in values.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
