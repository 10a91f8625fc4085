"""The list of mutants matches the package; `make mutants` runs the tests for every mutant."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import mutants

PACKAGE = mutants.ROOT / "gradtools"
ROOMS = {str(path.relative_to(PACKAGE).parent) for path in PACKAGE.rglob("*.py")}


@pytest.mark.parametrize("mutant", mutants.read(), ids=str)
def test_a_mutant_is_one_change_of_a_file_and_names_tests_that_are_there(mutant):
    text = mutant.of(PACKAGE)
    assert text != (PACKAGE / mutant.file).read_text(encoding="utf-8")
    compile(text, mutant.file, "exec")
    assert mutant.tests
    assert [name for name in mutant.tests if not (mutants.ROOT / "tests" / name).exists()] == []


def test_every_room_has_mutants():
    assert {str(Path(m.file).parent) for m in mutants.read()} == ROOMS
    assert len(mutants.read()) >= 60


@pytest.mark.slow
def test_a_mutant_is_seen_by_a_test_that_rests_on_it_and_by_no_other(tmp_path):
    copy = mutants.copied(tmp_path)
    package, tests = copy / "gradtools", copy / "tests"
    (package / "sums.py").write_text("def add(a, b):\n    return a + b\n")
    (tests / "test_sums.py").write_text(
        "from gradtools.sums import add\ndef test_it():\n    assert add(2, 3) == 5\n"
    )
    (tests / "test_zero.py").write_text(
        "from gradtools.sums import add\ndef test_it():\n    assert add(0, 0) == 0\n"
    )
    mutant = mutants.Mutant("sums.py", "a + b", "a - b", ("test_sums.py",))
    with mutants.changed(copy, mutant):
        found = [mutants.outcome(copy, [f"test_{name}.py"]) for name in ("sums", "zero")]
    assert found == ["seen", "survived"]
    assert mutants.outcome(copy, mutant.tests) == "survived"
    twice = mutants.Mutant("sums.py", "a", "b", ("test_sums.py",))
    with pytest.raises(ValueError, match="expected 1 occurrence of the text, found"):
        twice.of(package)
