"""The page that says where what stands is of this tree."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import walks


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="the page has the walks of Python 3.11")
def test_the_walks_are_those_of_now():
    run = (
        "import walks; page = walks.PAGE.read_text('utf-8'); "
        "assert walks.written(page, walks.blocks()) == page"
    )
    done = subprocess.run(  # on a fresh interpreter: what runs first in a process is made once
        [sys.executable, "-c", run], cwd=walks.PAGE.parents[1] / "tests" / "support", check=False,
        capture_output=True, text=True, env=walks.environment(),
    )  # fmt: skip
    assert done.returncode == 0, f"python tests/support/walks.py writes them anew\n{done.stderr}"


def test_every_room_that_the_page_names_is_there():
    page = walks.PAGE.read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w/]+(?:\.py|/))`", page))
    places = [walks.HOUSE, walks.HOUSE.parent, walks.HOUSE / "torch", walks.HOUSE / "jax"]
    missing = [name for name in named if not any((place / name).exists() for place in places)]
    assert len(named) > 60 and not missing
