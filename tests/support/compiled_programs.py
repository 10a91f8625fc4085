"""What JAX compiles is kept in a folder, for test files whose cells are compiled again and again.

A file asks for it with `pytest_plugins` and `usefixtures("compiled_programs_kept")`. A cell makes
its functions anew, so JAX traces them anew; the programs that come out are those of other cells.
One process uses one folder, which its files share.
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
    """JAX keeps what it compiles in a folder, inside this block, if it does not so already.

    What is traced anew for each cell, such as a loop, often becomes a program that was there
    before, or that was forgotten. Programs that call back into Python are not kept.
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
    """Sets JAX's options; its cache is opened by the first program and must be told of others."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    for name, value in values.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
