"""A graph as text, SVG, DOT, Mermaid and a page: well-formed, complete, safe with any name."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np
import pytest

from gradtools.errors import GradtoolsError
from gradtools.seeing.graphs.nodes import Dependence
from gradtools.seeing.graphs.outline import size_text
from gradtools.seeing.graphs.outlining import outline_of
from gradtools.seeing.pictures import palette
from gradtools.seeing.pictures.drawing import interpreter
from tests.support.seeing_graphs import (
    SHAPES,
    Builder,
    cuts,
    linear_with_backward,
    transformer,
)

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(params=SHAPES, ids=str)
def graph(request):
    return SHAPES[request.param]()


# --- SVG ---------------------------------------------------------------------------------


def texts(svg: str) -> list[str]:
    return ["".join(e.itertext()) for e in ElementTree.fromstring(svg).iter(f"{SVG}text")]


@pytest.mark.slow_at("transformer")
def test_the_svg_parses_and_loads_nothing(graph):
    svg = graph.to_svg()
    root = ElementTree.fromstring(svg)
    assert root.tag == f"{SVG}svg"
    tags = {element.tag.removeprefix(SVG) for element in root.iter()}
    assert tags <= {"svg", "style", "rect", "text", "g", "title", "path"}
    assert svg.count("http") == 1 and "@import" not in svg and "url(" not in svg


def test_every_operation_is_told_in_the_unfolded_svg():
    graph = linear_with_backward()
    told = texts(graph.to_svg(depth=9))
    for node in graph.nodes:
        assert any(f" = {node.operation}(" in text for text in told)
    assert {"a = x", "b = params['w']", "d = params['b']", "loss = g"} <= set(told)
    assert "c = matmul(a, b)" in told and "l = transpose(a)" in told
    assert "gradient of params['b'] = k" in told
    assert "8×4 float32" in told and "alive anyway" in told and "64 B" in told


def test_a_cut_is_told_with_its_reason_and_marks_are_words():
    told = texts(cuts().to_svg())
    assert "✕ stopped on purpose" in told and "✕ leaves the framework" in told
    assert {"edited gradient", "custom rule", "frozen"} <= set(told)
    assert "✕ the gradient is cut here" in told and "derivative zero everywhere" in told


def test_a_theme_is_chosen():
    graph = SHAPES["square"]()
    assert "prefers-color-scheme" in graph.to_svg()
    for theme, colours in (("light", palette.LIGHT), ("dark", palette.DARK)):
        svg = graph.to_svg(theme=theme)
        assert "prefers-color-scheme" not in svg and colours.paper in svg
    for draw in (graph.to_svg, graph.to_html):
        with pytest.raises(GradtoolsError, match=f"^{draw.__name__}: theme='pink' is not known"):
            draw(theme="pink")


def test_expand_opens_what_it_names():
    graph = transformer(12)
    assert "▾ query" not in texts(graph.to_svg())
    assert "▾ query" in texts(graph.to_svg(expand="*.query"))
    named = texts(graph.to_svg(depth=0, expand="encoder.layers.3"))
    assert "▾ layers.3" in named


# --- colours -----------------------------------------------------------------------------

# Machado, Oliveira and Fernandes (2009), severity 1, on linear RGB.
VISION = {
    "usual": np.eye(3),
    "protan": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "deutan": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "tritan": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}


def linear(colour: str) -> np.ndarray:
    c = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    xyz = np.array(to_xyz) @ np.clip(rgb, 0, 1) / [0.9505, 1.0, 1.089]
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def contrast(a: str, b: str) -> float:
    light = [0.2126 * c[0] + 0.7152 * c[1] + 0.0722 * c[2] for c in (linear(a), linear(b))]
    return (max(light) + 0.05) / (min(light) + 0.05)


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("colours", [palette.LIGHT, palette.DARK], ids=["light", "dark"])
def test_passes_and_cuts_are_told_apart_by_every_kind_of_vision(vision, colours):
    told = [edge for edge, _ in colours.passes]
    seen = [lab(np.array(VISION[vision]) @ linear(colour)) for colour in told]
    for i, one in enumerate(seen):
        for two in seen[:i]:
            assert np.linalg.norm(one - two) > 30


@pytest.mark.parametrize("colours", [palette.LIGHT, palette.DARK], ids=["light", "dark"])
def test_text_has_contrast(colours):
    for _, fill in colours.passes:
        assert contrast(colours.ink, fill) > 7
        for text in (colours.faint, colours.cut):
            assert contrast(text, fill) > 4.5
    for edge, _ in colours.passes:
        assert contrast(edge, colours.paper) > 4.5


# --- text --------------------------------------------------------------------------------


def test_the_text_reads_as_a_program():
    assert str(SHAPES["square_twice"]()).splitlines()[:9] == [
        "forward",
        "  a = x                 3 float32   kept: alive anyway",
        "  b = square(a)         3 float32",
        "  → output = b          3 float32",
        "",
        "backward",
        "  c = multiply(a, 2)    3 float32   kept: 12 B",
        "  d = cotangent         3 float32   kept: alive anyway",
        "  e = multiply(c, d)    3 float32",
    ]


# --- DOT ---------------------------------------------------------------------------------

NODE = r'n\d+ \[label="(?:[^"\\]|\\.)*"(?:, \w+=(?:"(?:[^"\\]|\\.)*"|[\w.]+))*\];'
EDGE = r'n\d+ -> n\d+ \[color="#\w+"(?:, \w+=(?:"(?:[^"\\]|\\.)*"|[\w.]+))*\];'


@pytest.mark.slow_at("transformer")
def test_dot_has_every_box_and_arrow_in_well_formed_lines(graph):
    outline = outline_of(graph)
    opened = outline.opened(9)
    dot = graph.to_dot(depth=9)
    lines = [line.strip() for line in dot.splitlines()]
    nodes = [line for line in lines if re.fullmatch(NODE, line)]
    edges = [line for line in lines if re.fullmatch(EDGE, line)]
    assert len(nodes) == sum(len(column.boxes) for column in outline.columns)
    assert len(edges) == len(outline.seen_arrows(opened))
    unquoted = re.sub(r'"(?:[^"\\]|\\.)*"', "", dot)
    assert unquoted.count("{") == unquoted.count("}") == len(outline.columns + outline.blocks) + 1
    assert lines[0] == "digraph gradtools {" and lines[-1] == "}"


# --- Mermaid -----------------------------------------------------------------------------

MERMAID = [
    r"flowchart TD",
    r'\s+subgraph s\d+\["[^"\n]*"\]',
    r"\s+direction BT",
    r"\s+end",
    r'\s+n\d+(\(\["[^"]*"\]\)|\["[^"]*"\]|\[/"[^"]*"/\]|\[\["[^"]*"\]\]):::(pass[012]|alert)',
    r'  n\d+ (-->|-\.->|-\. "[^"]*" \.->|-- "[^"]*" --x) n\d+',
    r"  classDef \w+ fill:#\w+,stroke:#\w+,color:#\w+(,stroke-width:2px)?",
    r"  linkStyle \d+ stroke:#\w+,stroke-width:2px",
]


@pytest.mark.slow_at("transformer")
def test_mermaid_lines_are_well_formed_and_complete(graph):
    lines = graph.to_mermaid(depth=9).splitlines()
    for line in lines:
        assert any(re.fullmatch(form, line) for form in MERMAID), line
    outline = outline_of(graph)
    assert sum(bool(re.fullmatch(MERMAID[4], line)) for line in lines) == sum(
        len(column.boxes) for column in outline.columns
    )
    arrows = outline.seen_arrows(outline.opened(9))
    assert sum(bool(re.fullmatch(MERMAID[5], line)) for line in lines) == len(arrows)
    opens = sum("subgraph s" in line for line in lines)
    assert opens == sum(line.strip() == "end" for line in lines)


# --- the page ----------------------------------------------------------------------------


class Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.data: dict[str, str] = {}
        self.inside = ""

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.inside = dict(attrs).get("id", tag) if tag in ("script", "style") else ""

    def handle_endtag(self, tag):
        self.inside = ""

    def handle_data(self, data):
        if self.inside:
            self.data[self.inside] = self.data.get(self.inside, "") + data


def parsed(html: str) -> Page:
    page = Page()
    page.feed(html)
    return page


@pytest.mark.slow_at("transformer")
def test_the_page_loads_nothing(graph):
    html = graph.to_html()
    page = parsed(html)
    names = {name for _, attrs in page.tags for name in attrs}
    assert not names & {"src", "href", "action", "data", "srcset", "poster"}
    assert not {"link", "img", "iframe", "object", "base"} & {tag for tag, _ in page.tags}
    urls = set(re.findall(r"https?://[^\"'<>\s]+", html))
    assert urls <= {"http://www.w3.org/2000/svg"}
    policy = next(a["content"] for t, a in page.tags if a.get("http-equiv"))
    assert policy.startswith("default-src 'none'")
    assert "@import" not in html and "url(" not in html


@pytest.mark.slow_at("transformer", "random_graph")
def test_the_page_holds_every_box_and_arrow(graph):
    data = json.loads(parsed(graph.to_html()).data["graph"])
    outline = outline_of(graph)
    keys = {item.key for column in outline.columns for item in (column, *column.walk())}
    assert {int(key) for key in data["items"]} == keys
    ends = [(arrow.source, arrow.target) for arrow in outline.arrows]
    assert [(arrow["source"], arrow["target"]) for arrow in data["arrows"]] == ends
    laid = json.loads(interpreter().eval(f"JSON.stringify(layout.graphOf({json.dumps(data)}))"))
    carried = {n for level in laid["levels"].values() for _, ns in level["strands"] for n in ns}
    assert carried | set(laid["threads"]) == set(range(len(outline.arrows)))


# --- files and edges ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("suffix", "start"),
    [
        *((".svg", "<svg"), (".html", "<!doctype html>"), (".dot", "digraph"), (".gv", "digraph")),
        *((".mmd", "flowchart TD"), (".md", "```mermaid\nflowchart"), (".txt", "forward\n")),
    ],
)
def test_a_file_has_the_form_of_its_suffix(tmp_path, suffix, start):
    path = tmp_path / f"graph{suffix}"
    SHAPES["square"]().save(path)
    assert path.read_text(encoding="utf-8").startswith(start)


def test_an_unknown_suffix_is_refused_with_those_that_are_known(tmp_path):
    with pytest.raises(GradtoolsError, match=r"suffix '\.png'; expected one of \.svg, \.html"):
        SHAPES["square"]().save(tmp_path / "graph.png")


def test_edges_say_what_is_saved_and_what_is_cut():
    edges = linear_with_backward().edges
    saved = {(edge.source, edge.target, edge.bytes) for edge in edges if edge.saved}
    assert saved == {(None, 7, 128), (2, 5, 64)}
    told = {edge.cut for edge in cuts().edges if edge.cut}
    assert told == {"stopped on purpose", "leaves the framework"}
    strengths = {edge.strength for edge in cuts().edges}
    assert strengths >= {Dependence.CUT, Dependence.ZERO_DERIVATIVE, Dependence.DIFFERENTIABLE}


def test_a_mask_is_no_cut():
    b = Builder()
    x = b.input("x", 4)
    mask = b.op("compare", x, dtype="bool", loss="discrete")
    assert not [e for e in b.graph(b.op("where", mask, x, dtype="float32")).edges if e.cut]


def test_what_reaches_the_result_through_a_comparison_alone_is_cut():
    b = Builder()
    x = b.input("x", 4)
    mask = b.op("compare", x, dtype="bool", loss="discrete")
    volume = b.op("mean", b.op("cast", mask, dtype="float32", loss="discrete"), shape=())
    edges = b.graph(volume).edges
    assert [edge.cut for edge in edges if edge.cut] == ["a discrete step"]


@pytest.mark.parametrize(
    ("size", "text"),
    [
        *((0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (16_384, "16 kB"), (999_600, "1.0 MB")),
        *((1_234_567, "1.2 MB"), (5_000_000_000, "5.0 GB"), (7 * 10**15, "7000 TB")),
    ],
)
def test_sizes_are_told_in_short(size, text):
    assert size_text(size) == text
