"""In layouts of many graphs, no boxes overlap, and nothing is clipped or missing."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import combinations

import pytest

from gradtools.seeing.graphs.outlining import outline_of
from gradtools.seeing.pictures.box_text import LINE, size_of, text_width
from gradtools.seeing.pictures.drawing import interpreter
from gradtools.seeing.pictures.page_data import script
from tests.support.scenes import Scene, fitted, picture_of
from tests.support.seeing_graphs import SHAPES, random_graph, transformer

VIEWS = ("fitted", "closed", "open")
MORE = {f"random_{seed}": lambda seed=seed: random_graph(40, seed, 20) for seed in range(1, 7)}


def view(name: str, way: str) -> Scene:
    graph = (SHAPES | MORE)[name]()
    if way == "fitted":
        return fitted(outline_of(graph))
    outline = outline_of(graph)
    return picture_of(outline, outline.opened(0 if way == "closed" else 99))


@pytest.fixture(scope="module")
def pictures() -> dict[tuple[str, str], Scene]:
    return {}


CASES = [(name, way) for name in SHAPES for way in VIEWS]
CASES += [(name, way) for name in MORE for way in ("fitted", "open")]


@pytest.fixture(params=CASES, ids="-".join)
def picture(request, pictures) -> Scene:
    if request.param not in pictures:
        pictures[request.param] = view(*request.param)
    return pictures[request.param]


def overlap(a: tuple[float, ...], b: tuple[float, ...], room: float = 0.0) -> bool:
    """Return whether two rectangles (left, top, right, bottom) are closer than `room`."""
    across = a[0] < b[2] + room and b[0] < a[2] + room
    return across and a[1] < b[3] + room and b[1] < a[3] + room


def rectangle(thing) -> tuple[float, ...]:
    return thing.x, thing.y, thing.x + thing.width, thing.y + thing.height


def rectangles(picture: Scene) -> dict[int, tuple[float, ...]]:
    return {placed.item.key: rectangle(placed) for placed in picture.boxes}


def points(line, count: int = 10) -> Iterator[tuple[float, float]]:
    """Yield points at small distances along a line."""
    x = y = 0.0
    for name, numbers in line.steps:
        for i in range(count + 1):
            t = i / count
            if name == "L":
                yield x + (numbers[0] - x) * t, y + (numbers[1] - y) * t
            if name == "C":
                a, b = (1 - t) ** 3, 3 * t * (1 - t) ** 2
                c, d = 3 * t * t * (1 - t), t**3
                px, py = numbers[0::2], numbers[1::2]
                yield (
                    a * x + b * px[0] + c * px[1] + d * px[2],
                    (a * y + b * py[0] + c * py[1] + d * py[2]),
                )
        x, y = numbers[-2:]


@pytest.mark.sampled(40, 75)
@pytest.mark.slow_at("transformer-fitted", "transformer-closed")
@pytest.mark.sweep_at("transformer-open")
def test_boxes_do_not_overlap(picture):
    for a, b in combinations(rectangles(picture).values(), 2):
        assert not overlap(a, b, 6.0)


@pytest.mark.sweep_at("transformer-open")
def test_frames_hold_their_own_boxes_and_no_others(picture):
    boxes = rectangles(picture)
    for frame in picture.frames:
        inside = {item.key for item in frame.block.walk()}
        left, top, right, bottom = rectangle(frame)
        for key, box in boxes.items():
            if key in inside:
                assert box[0] > left and box[1] > top and box[2] < right and box[3] < bottom
            else:
                assert not overlap(box, (left, top, right, bottom), 6.0)


def test_every_box_of_the_view_is_there_once(picture):
    drawn = picture.outline.drawn(picture.opened)
    keys = [placed.item.key for placed in picture.boxes]
    assert sorted(keys) == sorted(item.key for event, _, item in drawn if event == "box")


def test_text_fits_its_box(picture):
    for placed in picture.boxes:
        card = placed.card
        for row in card.rows:
            assert text_width(row.text, size_of(row.style)) <= card.width - 12
            assert 8 < row.y < card.height - 3
        for above, below in zip(card.rows, card.rows[1:], strict=False):
            assert below.y - above.y >= size_of(below.style)


@pytest.mark.slow_at(
    "shared_module-open",
    "random_graph-fitted",
    "random_graph-open",
)
@pytest.mark.sweep_at("transformer-open")
def test_lines_do_not_run_through_boxes(picture):
    boxes = list(rectangles(picture).values())
    for line in picture.lines:
        for x, y in points(line):
            for left, top, right, bottom in boxes:
                assert not (left + 1 < x < right - 1 and top + 1 < y < bottom - 1)


@pytest.mark.slow_at("transformer-open")
def test_every_arrow_is_drawn_from_its_source_to_its_target(picture):
    """Trace the line segments of each arrow from its source box to the border of its target."""
    boxes = rectangles(picture)
    onward: dict[tuple[int, int], list[tuple[float, float]]] = {}
    starts: dict[int, list[tuple[float, float]]] = {key: [] for key in boxes}
    for line in picture.lines:
        begin, end = line.steps[0][1], line.steps[-1][1][-2:]
        onward.setdefault(rounded(begin), []).append(end)
        for key, box in boxes.items():
            if overlap(box, (*begin, *begin), 0.2):
                starts[key].append(end)
    for arrow in picture.outline.seen_arrows(picture.opened):
        ends = list(starts[arrow.source])
        known: dict[tuple[int, int], tuple[float, ...]] = {}
        while ends:
            end = ends.pop()
            if rounded(end) not in known:
                known[rounded(end)] = end
                ends += onward.get(rounded(end), [])
        box = boxes[arrow.target]
        assert any(overlap(box, (*point, *point), 0.2) for point in known.values())


def rounded(point: tuple[float, ...]) -> tuple[int, int]:
    return round(10 * point[0]), round(10 * point[1])


def test_labels_lie_free(picture):
    labels = [
        (label.x, label.y - 7, label.x + text_width(label.text, LINE), label.y + 7)
        for label in picture.labels
    ]
    for a, b in combinations(labels, 2):
        assert not overlap(a, b, -0.1)
    for box in rectangles(picture).values():
        assert not any(overlap(box, label) for label in labels)


def test_all_lies_on_the_page(picture):
    page = (0.0, picture.top, picture.width, picture.top + picture.height)
    things = [*rectangles(picture).values(), *map(rectangle, picture.frames)]
    for left, top, right, bottom in things:
        assert left >= page[0] and top >= page[1] and right <= page[2] and bottom <= page[3]
    for line in picture.lines:
        for x, y in points(line, 3):
            assert page[0] <= x <= page[2] and page[1] <= y <= page[3]


def test_a_transformer_of_twelve_layers_fits_one_screen():
    picture = fitted(outline_of(transformer(12)))
    assert picture.width <= 1800 and picture.height <= 1400
    assert len(picture.boxes) >= 12


def test_forward_runs_down_and_backward_up():
    picture = view("linear_with_backward", "open")
    phases = {item.key: item.phase for c in picture.outline.columns for item in c.walk()}
    boxes = rectangles(picture)
    for arrow in picture.outline.arrows:
        if phases[arrow.source] == phases[arrow.target]:
            down = boxes[arrow.source][1] < boxes[arrow.target][1]
            assert down == (phases[arrow.source] % 2 == 0)


# --- the script of the HTML page, in a stub document --------------------------------------------

STUB = """
const element = () => ({
  textContent: "", innerHTML: "", value: "", dataset: {}, listeners: {},
  classList: { toggle() {}, contains: () => false },
  addEventListener(name, act) { this.listeners[name] = act; },
  setAttribute() {}, focus() {}, matches: () => false,
  querySelector: () => null, querySelectorAll: () => [],
  getBoundingClientRect: () => ({ left: 0, top: 0, width: 1600, height: 1000 }),
});
const elements = new Map();
const document = {
  documentElement: element(), addEventListener() {},
  getElementById(id) {
    if (!elements.has(id)) elements.set(id, element());
    return elements.get(id);
  },
};
const window = {}, addEventListener = () => {}, matchMedia = () => ({ matches: false });
const stage = document.getElementById("stage"), canvas = element(), world = element();
stage.firstElementChild = canvas;
canvas.firstElementChild = world;
"""


class Reader:
    """Simulates a user who expands and collapses blocks on the HTML page of a graph."""

    def __init__(self, graph) -> None:
        data = re.search(r'id="graph">(.*?)</script>', graph.to_html(), re.DOTALL)[1]
        self.script = interpreter()
        self.script.eval(STUB)
        self.script.set("data", data)
        self.script.eval('document.getElementById("graph").textContent = data')
        self.script.eval("(() => {" + script("page.js") + "})()")

    def drawn(self) -> str:
        """Return the SVG on the page without the parts that exist only on interactive pages."""
        body = re.sub(r' tabindex="0"[^>]*', "", self.script.eval("world.innerHTML"))
        body = re.sub(r'<g class="tab">(<rect class="hot"[^>]*>)(.*?</text>)</g>', r"\2", body)
        return body.replace(" found", "")

    def status(self) -> str:
        return self.script.eval('document.getElementById("status").textContent')


# For a large graph, such as the transformer, the page draws only the visible part.
@pytest.mark.sampled(4, 15)
@pytest.mark.parametrize("name", [name for name in SHAPES if name != "transformer"])
def test_the_page_draws_what_a_file_shows(name):
    outline = outline_of(SHAPES[name]())
    reader = Reader(SHAPES[name]())
    assert reader.drawn() == fitted(outline).body
    every = frozenset(block.key for block in outline.blocks)
    for opened, act in ((every, "true"), (frozenset(), "false")):
        reader.script.eval(f"window.gradtools.setAll({act})")
        assert reader.drawn() == picture_of(outline, opened).body
    # expand the blocks, then collapse them
    for block in (*outline.blocks[:3], *outline.blocks[:3]):
        reader.script.eval(f"window.gradtools.toggle({block.key})")
        opened ^= {block.key}
        assert reader.drawn() == picture_of(outline, opened).body
        assert reader.status().startswith(block.title[:10])


def test_the_search_of_the_page_opens_what_it_finds():
    reader = Reader(transformer(12))
    reader.script.eval(
        'const search = document.getElementById("search");'
        'search.value = "attention.query.weight"; search.listeners.input();'
    )
    assert reader.status() == "12 found: Enter goes to the next"
    reader.script.eval('search.listeners.keydown({ key: "Enter" })')
    assert reader.status().startswith("1 of 12")
    assert "found" in reader.script.eval("world.innerHTML")
    assert "384×384 float32" in reader.drawn()


@pytest.mark.slow
def test_of_a_large_graph_the_page_draws_what_is_in_view():
    reader = Reader(transformer(12))
    reader.script.eval("window.gradtools.setAll(true)")
    picture = json.loads(
        reader.script.eval(
            "const whole = window.gradtools.draft();"
            "JSON.stringify({ boxes: whole.boxes, width: whole.width, lines: whole.lines.length })"
        )
    )
    far = reader.drawn()
    count = len(picture["boxes"])
    # the page draws all boxes, but no text
    assert count > 400 and far.count('class="card"') == count
    assert "<text" not in far and "<title" not in far
    assert far.count("<") < 6 * count  # the page draws only the card of each box
    press = lambda name, times: reader.script.eval(
        f'for (let i = 0; i < {times}; i++) document.getElementById("{name}").listeners.click();'
    )
    press("larger", 12)
    assert "<text" in reader.drawn()
    met = []
    for _ in range(5):  # only the visible part and its surroundings are drawn
        view = json.loads(reader.script.eval("JSON.stringify(window.gradtools.view())"))
        left, upper = -view["x"] / view["scale"], -view["y"] / view["scale"]
        right, lower = left + 1600 / view["scale"], upper + 1000 / view["scale"]
        drawn = {int(key) for key in re.findall(r'class="box[^>]*data-key="(\d+)"', reader.drawn())}
        inside = {b["key"] for b in picture["boxes"] if left < b["x"] < right}
        inside &= {b["key"] for b in picture["boxes"] if upper < b["y"] < lower}
        assert inside <= drawn and len(drawn) < count / 2
        met.append(len(inside))
        at = "{ pointerId: 1, clientX: 0, clientY: %d }"
        reader.script.eval(f"canvas.listeners.pointerdown({at % 0})")
        reader.script.eval(f"canvas.listeners.pointermove({at % -1500})")
        reader.script.eval(f"canvas.listeners.pointerup({at % -1500})")
    assert sum(map(bool, met)) > 2
