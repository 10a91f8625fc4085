"""MkDocs hook that builds the API reference from docstrings (see mkdocs.yml).

A line ``::: gradtools.torch.grad`` on a page becomes the function's signature and docstring;
``::: gradtools.custom_rules.CustomRule defvjp defjvp`` also shows these members of the class, and
``::: gradtools.testing.Report *`` also shows all members with docstrings. ``::: $ gradtools check``
becomes the command's help, and ``::: kinds`` becomes the table of the findings of `why_zero`.
Objects are imported, so the signature of a bound method does not contain `self`.
"""

from __future__ import annotations

import importlib
import inspect
import io
import re
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from typing import Any

from gradtools import cli
from gradtools.seeing.diagnostics.findings import KINDS

COMMAND = re.compile(r"^::: \$ gradtools (.*)$", re.MULTILINE)
ENTRY = re.compile(r"^::: (\S+)((?: \S+)*)$", re.MULTILINE)
SECTION = re.compile(
    r"^(Args|Attributes|Returns|Raises|Yields|Example|Examples):$", re.MULTILINE
)
ITEM = re.compile(r"^(\*{0,2}\w+(?:, \*{0,2}\w+)*): ", re.MULTILINE)
PLAIN = re.compile(r"(`+.*?`+)", re.DOTALL)
TITLES = {"Args": "Arguments", "Attributes": "Attributes", "Raises": "Raises"}
WIDTH = 90


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Replaces the lines ``::: path`` by signatures and docstrings."""
    markdown = COMMAND.sub(lambda found: command(found[1].split()), markdown)
    markdown = re.sub(r"^::: kinds$", lambda _: kinds(), markdown, flags=re.M)
    return ENTRY.sub(lambda found: entry(found[1], found[2].split()), markdown)


def kinds() -> str:
    """Returns the table of the kinds of findings, with reasons and fixes."""
    rows = [f"| {name} | {k.reason} | {k.fix} |" for name, k in KINDS.items()]
    return "\n".join(["| kind | reason | fix |", "|---|---|---|", *rows])


def command(words: list[str]) -> str:
    """Returns the output of `gradtools ... --help`."""
    printed = io.StringIO()
    with redirect_stdout(printed), suppress(SystemExit):
        cli.main([*words, "--help"])
    heading = f"## gradtools {words[0]} {{ #{words[0]} }}\n\n" if words else ""
    return f"{heading}```text\n{printed.getvalue().rstrip()}\n```"


def entry(path: str, members: list[str]) -> str:
    """Returns the headings, signatures and docstrings of an object and its members."""
    module, _, name = path.rpartition(".")
    thing = getattr(importlib.import_module(module), name)
    parts = [
        f"## {name} {{ #{name} }}",
        *described(name, thing, _caller(module)),
    ]
    for member in _public(thing) if members == ["*"] else members:
        value = inspect.getattr_static(thing, member)
        parts += [
            f"### {name}.{member} {{ #{name}.{member} }}",
            *described(member, value, "", inspect.isfunction(value)),
        ]
    return "\n\n".join(parts) + "\n"


def described(
    name: str, thing: Any, caller: str, is_method: bool = False
) -> Iterator[str]:
    """Yields the signature, if the object is callable, and the docstring in Markdown."""
    if isinstance(thing, (staticmethod, classmethod)):
        is_method = isinstance(thing, classmethod)
        thing = thing.__func__
    is_error = isinstance(thing, type) and issubclass(thing, BaseException)
    if callable(thing) and not is_error:
        yield f"```python\n{signature(caller + name, thing, is_method)}\n```"
    yield from documented(inspect.getdoc(thing) or "")


def signature(name: str, thing: Any, is_method: bool) -> str:
    """Formats a signature, with one parameter per line if the signature does not fit on one line.

    is_method: Whether the first parameter is the object or the class.
    """
    found = inspect.signature(thing)
    kept = [_bare(p) for p in found.parameters.values()][is_method:]
    returned = found.return_annotation
    returned = _Bare(returned) if isinstance(returned, str) else returned
    found = found.replace(parameters=kept, return_annotation=returned)
    if len(f"{name}{found}") <= WIDTH:
        return f"{name}{found}"
    ending = str(found.replace(parameters=[]))[1:]
    return (
        f"{name}(\n"
        + "".join(f"    {line},\n" for line in _with_stars(kept))
        + ending
    )


class _Bare(str):
    """An annotation that is displayed as written in the source."""

    def __repr__(self) -> str:
        return str(self)


def _bare(parameter: inspect.Parameter) -> inspect.Parameter:
    written = isinstance(parameter.annotation, str)
    return (
        parameter.replace(annotation=_Bare(parameter.annotation))
        if written
        else parameter
    )


def documented(text: str) -> Iterator[str]:
    """Converts a Google-style docstring to Markdown, section by section."""
    pieces = SECTION.split(text)
    yield prose(pieces[0])
    for title, body in zip(pieces[1::2], pieces[2::2], strict=True):
        body, after = _own(body)
        if title.startswith("Example"):
            yield f"```pycon\n{body}\n```"
        elif title in TITLES:
            yield f"**{TITLES[title]}**\n\n" + "\n".join(_items(body))
        else:
            yield f"**{title}** {prose(body)}"
        if after:
            yield prose(after)


def prose(text: str) -> str:
    """Converts docstring text to Markdown; escapes special characters outside of code."""
    lines = text.strip("\n").replace("::\n\n", ":\n\n").split("\n\n")
    return "\n\n".join(
        p if p.startswith("    ") else _escaped(p) for p in lines
    ).strip()


def _escaped(text: str) -> str:
    pieces = PLAIN.split(text.replace("``", "`"))
    for k in range(0, len(pieces), 2):
        pieces[k] = re.sub(r"([*_\\\[\]])", r"\\\1", pieces[k]).replace(
            "<", "&lt;"
        )
    return "".join(pieces)


def _items(body: str) -> Iterator[str]:
    """Yields a list item for each "name: text"."""
    pieces = ITEM.split(body)
    if pieces[0].strip():
        yield f"- {_line(pieces[0])}"
    for name, said in zip(pieces[1::2], pieces[2::2], strict=True):
        yield f"- `{name}`: {_line(said)}"


def _line(text: str) -> str:
    return _escaped(" ".join(text.split()))


def _own(body: str) -> tuple[str, str]:
    """Splits the indented body of a section from the text after it."""
    lines = body.strip("\n").split("\n")
    end = next(
        (k for k, line in enumerate(lines) if line and line[0] != " "),
        len(lines),
    )
    own, after = "\n".join(lines[:end]), "\n".join(lines[end:])
    return inspect.cleandoc(own), after


def _with_stars(parameters: list[inspect.Parameter]) -> list[str]:
    shown, starred = [], False
    for p in parameters:
        starred = starred or p.kind is p.VAR_POSITIONAL
        if p.kind is p.KEYWORD_ONLY and not starred:
            shown.append("*")
            starred = True
        shown.append(str(p))
    return shown


def _public(thing: type) -> list[str]:
    """Returns the documented members of a class in source order."""
    return [
        name
        for name, value in vars(thing).items()
        if not name.startswith("_")
        if isinstance(value, property | staticmethod | classmethod)
        or inspect.isfunction(value)
        if inspect.getdoc(value)
    ]


def _caller(module: str) -> str:
    return "gt." if module in ("gradtools.torch", "gradtools.jax") else ""
