"""Names that the docstrings and comments of the package mention must exist."""

from __future__ import annotations

import warnings

import pytest

from tests.support import references
from tests.support.references import PACKAGE, Reference, is_known


@pytest.mark.slow
def test_every_name_in_backticks_and_every_file_is_there():
    for framework in ("torch", "jax"):
        pytest.importorskip(framework)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Deprecated modules issue warnings.
        every = [r for path in sorted(PACKAGE.rglob("*.py")) for r in references.references(path)]
        stale = [str(reference) for reference in every if not is_known(reference)]
    assert len(every) > 800
    assert not stale, "these names do not exist:\n" + "\n".join(stale)


@pytest.mark.parametrize(
    "name", ["chunking.nothing_such", "no_such_module.py", "gt.no_such_name", "torch.no_such_name"]
)
def test_what_is_gone_is_not_known(name):
    assert not is_known(Reference("gradtools/edits.py", 1, name))
