"""How many cells of the matrix of custom rules work, and how many are refused."""

from collections import Counter

from tests.support import support_matrix


def test_the_number_of_cells_that_do_not_work_is_known():
    found = Counter()
    for backend in ("torch", "jax"):
        for cell in support_matrix.all_cells(backend):
            refusal = support_matrix.refusal_of(backend, *cell)
            kind = "works" if refusal is None else "bug" if refusal.bug else "refused"
            kind = "left out" if support_matrix.left_out(backend, *cell) else kind
            found[backend, kind] += 1
    assert dict(found) == {
        ("torch", "works"): 2359,
        ("torch", "refused"): 155,
        ("jax", "works"): 2500,
        ("jax", "refused"): 138,
        ("jax", "left out"): 130,
    }
