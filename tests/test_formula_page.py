"""What stands on the page is what is computed: the written lines are parsed and evaluated."""

import numpy as np
import pytest
from formula_programs import PROGRAMS, READING
from formula_reading import check_page

from gradtools.seeing.formula.formula import derive


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_every_written_line_has_the_value_of_what_it_stands_for(name, order):
    formula = derive(PROGRAMS[name](), order)
    point = formula.point(np.random.default_rng(1))
    assert check_page(formula, point, **READING.get(name, {})) >= 2
