"""MkDocs hook that adds pages for repository files to the site (see mkdocs.yml).

A page may link to any file of the repository, and the hook makes a page of each linked file.
README.md is the home page. The page of a program contains its docstring, its stored output and
pictures (examples/printed) and its source. The page of a notebook contains its outputs. Markdown
files are not changed. A link to a missing file is not rewritten, so MkDocs in strict mode fails.

The programs are downloaded as one folder, examples.zip, since they import files that they share. A
notebook links to itself in Colab if REPO_URL is set (.github/workflows/docs.yml).

A page must not load a script, a style sheet or a picture from another host; otherwise the build
raises an error.
"""

from __future__ import annotations

import ast
import io
import json
import os
import posixpath
import re
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
PRINTED = ROOT / "examples" / "printed"
CODE = re.compile(
    r"(^( *)```.*?^\2```[ ]*$|`[^`\n]+`)", re.DOTALL | re.MULTILINE
)
LINK = re.compile(r"(\]\()([^)#:\s]+)(#[^)\s]*)?(?=\))")
HOST = r"""=["']?(?:https?:)?//[^>]*>"""
ELSEWHERE = re.compile(
    rf"""<(?:script|img|iframe|source)[^>]*\ssrc{HOST}"""
    rf"""|<link[^>]*rel=["']?(?:stylesheet|preconnect|preload)[^>]*\shref{HOST}"""
)

# Pages for contributors, which the search ranks last.
INTERNALS = (
    *(
        "architecture.",
        "adding_a_backend.",
        "accelerators.",
        "measured.",
        "upstream-bugs.",
        "upstream/",
    ),
    *(
        "benchmarks/",
        "tests/",
        "CHANGELOG.",
        "CONTRIBUTING.",
        "LICENSE.",
    ),
)
FRAMEWORKS = {"torch": "PyTorch", "jax": "JAX"}
EITHER = "import gradtools.torch as gt  # or: import gradtools.jax as gt"
BLOCK = re.compile(
    rf"^```python[^\n]*\n(?:(?!```)[^\n]*\n)*?{re.escape(EITHER)}\n.*?^```$",
    re.S | re.M,
)
WIDE = ("index.md", "gallery.md", "graphs.md")  # pages of pictures
GALLERY = "assets/gallery/"
PICTURE = re.compile(
    r"!\[([^\]]*)\]\(((?:\.\./)*(?:docs/)?assets/gallery/[^)]*\.svg)\)"
)
SPELLINGS = (
    *(
        ("ise", "ize"),
        ("isi", "izi"),
        ("isa", "iza"),
        ("our", "or"),
        ("elling", "eling"),
    ),
    *(("elled", "eled"), ("tre", "ter"), ("cence", "cense")),
)
SPELLED = re.compile(
    r"\b(?:(?:quant|normal|regular|optim|binar|linear|vector|initial|general|min|maxim|minim|random"
    r"|penal|visual|recogn|symmetr|token|parametr|discret|special)(?:is|iz)(?:e|ed|es|ing|ation|er)"
    r"|behaviou?r|colou?r|neighbou?r|modell?ing|labell?ed|cent(?:re|er)|licen[cs]e)s?\b",
    re.IGNORECASE,
)

_origins: dict[
    str, str
] = {}  # the source files of the pages, by path on the site


# --- the hook's events -------------------------------------------------------------------


def on_files(files: Any, config: Any) -> Any:
    """Adds a page for each repository file that a page links to, recursively."""
    _origins.clear()
    _origins.update(
        {f.src_uri: f"docs/{f.src_uri}" for f in files.documentation_pages()}
    )
    waiting = ["README.md", *_linked_from_docs()]
    while waiting:
        origin = waiting.pop()
        place = site_place(origin)
        if place in _origins or not (ROOT / origin).is_file():
            continue
        if files.get_file_from_path(place):
            continue
        _origins[place] = origin
        made = page_of(origin)
        if made is None:
            files.append(
                File.generated(config, place, abs_src_path=str(ROOT / origin))
            )
            continue
        files.append(File.generated(config, place, content=made))
        waiting += links(origin, made)
    if any(origin.startswith("examples/") for origin in _origins.values()):
        files.append(
            File.generated(config, "examples.zip", content=examples_folder())
        )
    if (ROOT / "docs" / "gallery.md").exists():
        for page in interactive_pages(config):
            files.append(page)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Rewrites links for the site, links pictures, and shows blocks for both frameworks as tabs."""
    here = page.file.src_uri
    if here.startswith(INTERNALS):
        page.meta.setdefault("search", {"boost": 0.1})
    if here in WIDE:
        page.meta.setdefault("hide", ["navigation", "toc"])
    markdown = PICTURE.sub(
        linked_picture, relinked(markdown, _origins[here], here)
    )
    markdown = BLOCK.sub(in_tabs, markdown)
    if here == "examples.md" or _origins[here].startswith("examples/"):
        markdown = with_downloads(markdown, _origins[here], here)
    return markdown


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Adds the other spelling of American and British words, for the search."""
    words = sorted({word.lower() for word in SPELLED.findall(html)})
    return (
        f"{html}<p hidden>{' '.join(map(respelled, words))}</p>"
        if words
        else html
    )


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Raises an error for a page that loads a resource from another host."""
    found = ELSEWHERE.search(output)
    if found:
        raise PluginError(
            f"{page.file.src_uri} loads from another host: {found[0]}"
        )
    return output


# --- differences between the site and the files ----------------------------------------------


def in_tabs(block: re.Match[str]) -> str:
    """Converts a block that runs in both frameworks to one tab per framework."""
    tabs = []
    for name in ("torch", "jax"):
        code = block[0].replace(EITHER, f"import gradtools.{name} as gt")
        shown = "".join(
            f"    {line}".rstrip() + "\n" for line in code.splitlines()
        )
        mark = "===" if tabs else "===!"  # the first tab begins a new set
        tabs.append(f'{mark} "{FRAMEWORKS[name]}"\n\n{shown}')
    return "\n".join(tabs)


def with_downloads(markdown: str, origin: str, here: str) -> str:
    """Adds links to the examples folder, and to Colab for a notebook."""
    place = posixpath.relpath("examples.zip", posixpath.dirname(here) or ".")
    shown = [f"[Download all examples]({place})"]
    repository = os.environ.get("REPO_URL", "").rstrip("/")
    if origin.endswith(".ipynb") and repository:
        path = repository.removeprefix("https://github.com/")
        at = f"{path}/blob/{os.environ.get('REPO_REF', 'main')}/{origin}"
        colab = "https://colab.research.google.com/github"
        shown.insert(0, f"[Open in Colab]({colab}/{at})")
    title, _, rest = markdown.partition("\n")
    return f"{title}\n\n{' | '.join(shown)}\n{rest}"


def examples_folder() -> bytes:
    """Returns the folder of examples as a zip file."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as folder:
        for path in sorted((ROOT / "examples").rglob("*")):
            if path.suffix in (".py", ".ipynb", ".c", ".cpp", ".h", ".txt"):
                # ZipInfo sets a fixed date, so equal files give an equal archive.
                entry = zipfile.ZipInfo(path.relative_to(ROOT).as_posix())
                entry.compress_type = zipfile.ZIP_DEFLATED
                folder.writestr(entry, path.read_bytes())
    return packed.getvalue()


def linked_picture(picture: re.Match[str]) -> str:
    """Links a picture of the gallery to its interactive page, at its natural width."""
    page = picture[2].removesuffix(".svg") + ".html"
    return f'<div class="picture" markdown>\n[{picture[0]}]({page} "open the graph")\n</div>'


def respelled(word: str) -> str:
    """Converts a word from British to American spelling, or vice versa."""
    for one, other in SPELLINGS:
        for a, b in ((one, other), (other, one)):
            if a in word:
                return word.replace(a, b)
    return word


def interactive_pages(config: Any) -> Iterator[File]:
    """Yields the interactive pages of the gallery's pictures."""
    sys.path.insert(0, str(ROOT))
    from tests.support.gallery import pictures

    for picture in pictures():
        page = picture.graph().to_html(title=picture.title)
        yield File.generated(
            config, f"{GALLERY}{picture.name}.html", content=page
        )


# --- links -------------------------------------------------------------------------------


def site_place(origin: str) -> str:
    """Maps the path of a repository file to its path on the site."""
    if origin == "README.md":
        return "index.md"
    if origin.startswith("docs/"):
        return origin.removeprefix("docs/")
    stem, extension = posixpath.splitext(origin)
    return f"{stem}.md" if extension in (".py", ".ipynb", "") else origin


def prose(markdown: str) -> Iterator[tuple[bool, str]]:
    """Yields the parts of a page in order, and whether each part is prose or code."""
    at = 0
    for code in CODE.finditer(markdown):
        yield True, markdown[at : code.start()]
        yield False, code[0]
        at = code.end()
    yield True, markdown[at:]


def links(origin: str, markdown: str) -> list[str]:
    """Returns the repository paths that a page links to."""
    folder = posixpath.dirname(origin)
    return [
        posixpath.normpath(posixpath.join(folder, found[2]))
        for is_prose, part in prose(markdown)
        if is_prose
        for found in LINK.finditer(part)
    ]


def relinked(markdown: str, origin: str, here: str) -> str:
    """Rewrites links relative to `origin` as links relative to the page `here` of the site."""
    folder = posixpath.dirname(origin)

    def link(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, found[2]))
        if not (ROOT / target).is_file() and site_place(target) not in _origins:
            return found[0]
        place = posixpath.relpath(
            site_place(target), posixpath.dirname(here) or "."
        )
        return f"{found[1]}{place}{found[3] or ''}"

    return "".join(
        LINK.sub(link, part) if ok else part for ok, part in prose(markdown)
    )


def _linked_from_docs() -> list[str]:
    return [
        target
        for page in sorted((ROOT / "docs").rglob("*.md"))
        for target in links(
            str(page.relative_to(ROOT)), page.read_text(encoding="utf-8")
        )
        if not target.startswith("docs/")
    ]


# --- pages of files ----------------------------------------------------------------------


def page_of(origin: str) -> str | None:
    """Returns a file as Markdown, or None if the file is copied unchanged."""
    path = ROOT / origin
    if path.suffix == ".py":
        return program(path)
    if path.suffix == ".ipynb":
        return notebook(json.loads(path.read_text(encoding="utf-8")))
    if path.suffix == ".md":
        return path.read_text(encoding="utf-8")
    if path.suffix == "":
        return f"# {path.name}\n\n{fenced(path.read_text(encoding='utf-8'), 'text')}"
    return None


def program(path: Path) -> str:
    """Formats a program: docstring, stored output and pictures, and source."""
    source = path.read_text(encoding="utf-8")
    said = (ast.get_docstring(ast.parse(source)) or "").replace("``", "`")
    said = re.sub(r"<(?=[a-z])", "&lt;", said)  # "<x, y>" is not a tag
    parts = [f"# {_title(path)}", said.replace("::\n", ":\n")]
    kept = PRINTED / f"{path.stem}.txt"
    if path.parent.name == "examples" and kept.exists():
        parts += [
            "## Output",
            fenced(kept.read_text(encoding="utf-8"), "text"),
        ]
        pictures = [
            p for p in sorted(PRINTED.glob(f"{path.stem}.*")) if p != kept
        ]
        parts += [f"![{p.stem}](printed/{p.name})" for p in pictures]
    parts += ["## The program", fenced(source, "python")]
    return "\n\n".join(parts) + "\n"


def _title(path: Path) -> str:
    """Returns a program's title in the list of examples, or its file name."""
    listed = ROOT / "docs" / "examples.md"
    text = listed.read_text(encoding="utf-8") if listed.exists() else ""
    found = re.search(rf"\[([^\]]+)\]\(\.\./examples/{path.stem}\.py\)", text)
    return found[1] if found else path.stem


def notebook(content: dict[str, Any]) -> str:
    """Formats a notebook's cells with their stored outputs."""
    parts = []
    for cell in content["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(fenced(source, "python"))
        parts += [_output(output) for output in cell["outputs"]]
    return "\n\n".join(parts) + "\n"


def _output(output: dict[str, Any]) -> str:
    """Formats one output in the richest form that a page can show."""
    if output["output_type"] == "stream":
        return fenced("".join(output["text"]), "text")
    data = {kind: "".join(shown) for kind, shown in output["data"].items()}
    if "text/html" in data:
        shown = _in_one_block(data["text/html"])
        return f'<div class="output" data-search-exclude>\n{shown}\n</div>'
    if "image/png" in data:
        return f'<p><img alt="" src="data:image/png;base64,{data["image/png"]}"></p>'
    return fenced(data["text/plain"], "text")


def _in_one_block(shown: str) -> str:
    """Removes empty lines, at which Markdown would end the HTML block."""
    return re.sub(
        r"\n[ \t]*(?=\n)", "\n&#8203;" if "<pre" in shown else "", shown
    )


def fenced(text: str, language: str) -> str:
    """Formats a code block, with a fence that does not occur in the text."""
    fence = "`" * max(
        3, 1 + max((len(run) for run in re.findall("`+", text)), default=0)
    )
    return f"{fence}{language}\n{text.rstrip(os.linesep)}\n{fence}"
