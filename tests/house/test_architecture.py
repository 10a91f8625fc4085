"""Tests that docs/architecture.md matches the source tree."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter

import pytest

from tests.support import walks


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info >= (3, 12), reason="the page shows the calls in Python 3.11")
def test_the_walks_are_those_of_now():
    done = fresh(
        "from tests.support import walks; page = walks.PAGE.read_text('utf-8'); "
        "assert walks.written(page, walks.blocks()) == page"
    )
    assert done.returncode == 0, f"run python -m tests.support.walks\n{done.stderr}"


def fresh(run):
    """Run code in a fresh interpreter, because the first run in a process fills caches."""
    return subprocess.run(
        [sys.executable, "-c", run], cwd=walks.PAGE.parents[1], check=False,
        capture_output=True, text=True, env=walks.environment(),
    )  # fmt: skip


# The maximum numbers of gradtools calls and of calls into another file in each call tree.
AT_MOST = {
    "grad, torch": (31, 19),
    "grad, jax": (54, 30),
    "reverse_gradient, torch": (39, 25),
    "reverse_gradient, jax": (180, 94),
    "chunked, torch": (384, 149),
    "chunked, jax": (830, 258),
}


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info >= (3, 12), reason="the limits apply to Python 3.11")
def test_no_walk_grows_longer():
    done = fresh(
        "from tests.support import walks; "
        "print({k: (c.calls, c.changes) for k, c in walks.counts().items()})"
    )
    assert done.returncode == 0, done.stderr
    counts = ast.literal_eval(done.stdout)
    assert counts.keys() == AT_MOST.keys()
    longer = {k: n for k, n in counts.items() if n[0] > AT_MOST[k][0] or n[1] > AT_MOST[k][1]}
    assert not longer, f"more calls than the limits: {longer}"
    assert all(0 < changes < calls for calls, changes in counts.values())


def test_every_room_that_the_page_names_is_there():
    page = walks.PAGE.read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w/]+(?:\.py|/))`", page))
    places = [walks.HOUSE, walks.HOUSE.parent, walks.HOUSE / "torch", walks.HOUSE / "jax"]
    missing = [name for name in named if not any((place / name).exists() for place in places)]
    assert len(named) > 60 and not missing


# Imports that run only on demand and are therefore allowed to form an import cycle.
BACK = {}


def imports(path, rooms):
    """Yield the gradtools modules that a file imports anywhere except for type checking."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    types = [
        n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.dump(n.test)
    ]
    alone = {id(inner) for n in types for inner in ast.walk(n)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and id(node) not in alone:
            package, _, module = (node.module or "").partition(".")
            if package != "gradtools":
                continue
            for name in (f"{module}.{alias.name}".lstrip(".") for alias in node.names):
                yield from {name if name in rooms else module} & rooms


@pytest.mark.slow
def test_no_room_is_in_a_circle_of_imports():
    files = {
        ".".join(path.relative_to(walks.HOUSE).with_suffix("").parts).removesuffix(
            ".__init__"
        ): path
        for path in walks.HOUSE.rglob("*.py")
    }
    graph = {room: {*imports(path, files.keys())} - {room} for room, path in files.items()}
    assert len(graph) > 200 and sum(map(len, graph.values())) > 1000
    assert all(back <= graph[room] for room, back in BACK.items())
    TopologicalSorter({room: graph[room] - BACK.get(room, set()) for room in graph}).prepare()


# Modules that first_divergence imports when it is called, to record the operations of both models.
ON_DEMAND = ("testing/diverging/torch_run.py", "testing/diverging/jax_run.py")


def test_no_room_outside_of_seeing_imports_it_before_it_is_asked_for():
    early = {}
    late = [f"gradtools.{name.removesuffix('.py').replace('/', '.')}." for name in ON_DEMAND]
    for path in walks.HOUSE.rglob("*.py"):
        room = path.relative_to(walks.HOUSE)
        if room.parts[0] == "seeing" or room.as_posix() in ON_DEMAND:
            continue
        body = ast.parse(path.read_text(encoding="utf-8")).body
        named = [f"{n.module}." for n in body if isinstance(n, ast.ImportFrom)]
        named += [f"{alias.name}." for n in body if isinstance(n, ast.Import) for alias in n.names]
        seeing = [name for name in named if name.startswith(("gradtools.seeing.", *late))]
        # `_upstream` is cheap to import
        early[str(room)] = [name for name in seeing if "_upstream" not in name]
    assert len(early) > 100 and not {room: names for room, names in early.items() if names}
