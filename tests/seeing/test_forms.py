"""Graphs as text, SVG, DOT, Mermaid and HTML are well-formed, complete and self-contained."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from gradtools.errors import GradtoolsError
from gradtools.seeing.graphs.nodes import Dependence
from gradtools.seeing.graphs.outlining import outline_of
from gradtools.seeing.pictures import palette
from tests.support.seeing_graphs import (
    SHAPES,
    cuts,
    linear_with_backward,
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
    assert "✕ detached" in told and "✕ left_framework" in told
    assert {"edited gradient", "custom rule", "frozen"} <= set(told)
    assert "✕ the gradient is cut here" in told and "derivative zero everywhere" in told


def test_a_theme_is_chosen():
    graph = SHAPES["square"]()
    assert "prefers-color-scheme" in graph.to_svg()
    for theme, colours in (("light", palette.LIGHT), ("dark", palette.DARK)):
        svg = graph.to_svg(theme=theme)
        assert "prefers-color-scheme" not in svg and colours.paper in svg
    for draw in (graph.to_svg, graph.to_html):
        with pytest.raises(GradtoolsError, match=f"^{draw.__name__}: theme is 'pink'; expected"):
            draw(theme="pink")


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


# --- files and special cases -------------------------------------------------------------


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


def test_edges_say_what_is_saved_and_what_is_cut():
    edges = linear_with_backward().edges
    saved = {(edge.source, edge.target, edge.bytes) for edge in edges if edge.saved}
    assert saved == {(None, 7, 128), (2, 5, 64)}
    told = {edge.cut for edge in cuts().edges if edge.cut}
    assert told == {"detached", "left_framework"}
    strengths = {edge.strength for edge in cuts().edges}
    assert strengths >= {Dependence.CUT, Dependence.ZERO_DERIVATIVE, Dependence.DIFFERENTIABLE}
