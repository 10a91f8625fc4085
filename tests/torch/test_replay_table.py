"""The table of state in docs/chunked-reference.md is what the programs say."""

import pytest

from tests.support.replay_table import PAGE, written


@pytest.mark.slow
def test_the_table_of_state_is_what_the_programs_say():
    page = PAGE.read_text()
    assert written(page) == page, "run python -m tests.support.replay_table"
