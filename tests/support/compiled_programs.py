"""What JAX compiles is kept in a folder, for test files whose cells are compiled again and again.

A file asks for it with `pytest_plugins` and `usefixtures("compiled_programs_kept")`. A cell makes
its functions anew, so JAX traces them anew; the programs that come out are those of other cells.
One process uses one folder, which its files share.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gradtools.testing.plugin import wanted_backends
from tests.conformance.rig.checking import programs_kept


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
