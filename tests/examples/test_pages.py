"""Every Python block in README.md and docs/ runs, and the pages contain the required text."""

from __future__ import annotations

import re
import sys
import tomllib
from dataclasses import replace

import pytest

from benchmarks import recipes
from tests.support.pages import OTHER_PACKAGES, PAGES, ROOT, Block, blocks, named

README = ROOT / "README.md"
TOUR = ROOT / "docs" / "tour.md"


# --- the code blocks ---------------------------------------------------------------------


@pytest.mark.slow_at("porting-to-flax.md:7")
@pytest.mark.sampled(16, 200)
@pytest.mark.parametrize("block", **named([b for b in blocks() if b.picks_a_backend]))
def test_a_block_runs_as_it_stands(block):
    block.run()


@pytest.mark.parametrize("block", **named([b for b in blocks() if "KERAS_BACKEND=" in b.text]))
def test_a_block_with_keras_runs_on_its_other_backend_too(block):
    here = block.text.partition("=")[2]
    other = {"torch": "jax", "jax": "torch"}[here]
    code = block.code.replace(f"gradtools.{here}", f"gradtools.{other}")
    replace(block, code=code, text=f"KERAS_BACKEND={other}").run()


@pytest.mark.slow_at(("jax", "force-fields.md:7"), ("jax", "large-vocabulary.md:7"))
@pytest.mark.sampled(torch=(30, 120), jax=(10, 120))
@pytest.mark.parametrize("block", **named([b for b in blocks() if not b.picks_a_backend]))
def test_a_block_runs_with_either_import(block, gt):
    block.with_backend(gt.__name__).run()


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_a_block_needs_nothing_from_outside_and_fits_the_width_of_a_page(page):
    for block in blocks([page]):
        assert not block.missing_names, f"{block.name}: {block.missing_names}"
        wide = [line for line in block.code.splitlines() if len(line) > 80]
        assert not wide, f"{block.name}: {wide}"


def test_a_name_that_a_block_does_not_define_is_seen():
    code = "import numpy as np\nf = lambda x: gt.grad(g)(x)\n\ndef g(x): return np.sum(x)\n"
    assert Block(README, 1, code).missing_names == {"gt"}


def test_every_block_of_python_is_found():
    fences = sum(page.read_text(encoding="utf-8").count("```python") for page in PAGES)
    assert len(blocks()) == fences


def test_every_package_that_a_block_imports_is_in_an_extra():
    """Continuous integration installs the extras, so every block runs there."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    named = {**project["project"]["optional-dependencies"], **project["dependency-groups"]}
    extras = {
        extra: {re.match(r"[\w-]+", one)[0].replace("-", "_") for one in wanted if type(one) is str}
        for extra, wanted in named.items()
    }
    others = {"scikit_learn": "sklearn"}  # imported under another name
    known = {others.get(name, name) for names in extras.values() for name in names}
    known |= {"gradtools", "numpy", "tokenizers", *sys.stdlib_module_names}
    missing = {b.name: b.packages - known for b in blocks() if b.end != "not run"}
    assert not {name: found for name, found in missing.items() if found}
    own = {others.get(name, name) for name in extras["integration"]} - {"gradtools"}
    assert own | {"tokenizers"} == OTHER_PACKAGES


def test_readme_and_tour_have_blocks_of_both_kinds():
    kinds = [block.picks_a_backend for block in blocks([README, TOUR])]
    assert kinds.count(True) >= 1 and kinds.count(False) >= 7


def test_a_block_that_fails_is_seen():
    for end, text in [("", ""), ("with", "A=1"), ("pytest", "test_it.py")]:
        code = "def test_it():\n    assert 1 + 1 == 3\n" + ("" if end == "pytest" else "test_it()")
        with pytest.raises(AssertionError):
            Block(README, 1, code, end, text).run()


def test_what_a_page_says_a_block_printed_is_held_to_what_it_prints():
    Block(README, 1, "print('one\\ntwo, 1.2e-16')", printed="two, 3.4e-17\n").run()
    with pytest.raises(AssertionError):
        Block(README, 1, "print('one')", printed="two\n").run()
    assert sum(bool(block.printed) for block in blocks()) >= 3


def test_a_block_with_settings_of_its_own_has_them():
    Block(README, 1, "import os\nassert os.environ['A'] == '1'", "with", "A=1").run()


@pytest.mark.parametrize(("end", "other"), [("raises", "pass"), ("warns", "pass")])
def test_a_block_that_does_not_end_as_its_title_says_is_seen(end, other):
    good = {
        "raises": "raise ValueError('no way')",
        "warns": "import warnings; warnings.warn('no way')",
    }
    Block(README, 1, good[end], end, "no way").run()
    with pytest.raises(BaseException, match="DID NOT"):
        Block(README, 1, other, end, "no way").run()


# --- the contents of the pages -----------------------------------------------------------


def test_every_public_name_is_shown_in_the_tour(gt):
    text = TOUR.read_text(encoding="utf-8")
    missing = [name for name in gt.__all__ if not re.search(rf"\b{name}\b", text)]
    # docs/grad-or-backward.md shows accumulate_gradients
    assert missing == ["accumulate_gradients"]


def test_the_readme_is_short_and_its_report_is_what_a_page_prints():
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    (report,) = re.findall(r"^```text\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    printed = (ROOT / "docs" / "lost-gradients.md").read_text(encoding="utf-8")
    assert report in printed


@pytest.mark.parametrize("name", recipes.PAGES)
def test_the_memory_of_a_recipe_is_what_its_program_measured(name):
    text = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    shown = text.partition(recipes.MARKS[0])[2].partition(recipes.MARKS[1])[0]
    codes = recipes.programs(name)
    for code in codes:
        compile(recipes.program(code, "torch"), name, "exec")
    assert shown.startswith(f"With {'; '.join(map(recipes.sizes, codes))}:")
    assert shown in recipes.RESULTS.read_text("utf-8")
    for way in recipes.PAGES[name]:
        assert f"| PyTorch | {way} |" in shown


# Search terms, and the page that has a heading with these words.
SOUGHT = {
    "GRPO": "recipes/large-vocabulary", "PPO": "recipes/large-vocabulary",
    "DPO": "recipes/large-vocabulary", "token means": "recipes/token-means",
    "per-example gradients": "tutorials/dp-sgd", "checkpointed model": "tutorials/dp-sgd",
    "TorchJD": "recipes/several-losses", "vocoder GAN": "recipes/several-losses",
    "TRPO": "recipes/curvature-products", "EWC": "recipes/curvature-products",
    "GGN": "recipes/curvature-products", "Hogwild": "grad-or-backward",
    "different sizes": "chunked", "DEQ": "recipes/implicit-layers",
    "bilevel": "recipes/implicit-layers", "iMAML": "recipes/implicit-layers",
    "QP": "recipes/implicit-layers", "Sinkhorn": "recipes/implicit-layers",
    "influence functions": "recipes/implicit-layers",
}  # fmt: skip


@pytest.mark.parametrize("words", SOUGHT)
def test_a_recipe_is_found_by_the_words_that_people_use(words):
    text = (ROOT / "docs" / f"{SOUGHT[words]}.md").read_text(encoding="utf-8")
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    assert any(words.lower() in heading.lower() for heading in headings)


def test_the_cheat_sheet_names_every_public_function(gt):
    text = (ROOT / "docs" / "cheat-sheet.md").read_text(encoding="utf-8")
    named = set(re.findall(r"gt\.(\w+)", text))
    assert named == set(gt.__all__)


def test_every_link_leads_to_a_file():
    for page in PAGES:
        prose = re.sub(
            r"^```.*?^```|`[^`\n]+`", "", page.read_text(encoding="utf-8"), flags=re.M | re.S
        )
        for link in re.findall(r"\]\(([^)#:\s]+)\)", prose):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_every_example_is_in_the_list():
    text = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"\]\(\.\./examples/(\w+)\.py\)", text))
    assert listed == {path.stem for path in (ROOT / "examples").glob("[ucd][0-9re]*.py")}
