"""Prepares a release for a package index: ``python .ci/for_index.py REPOSITORY_URL TAG``.

The version is the tag's. The README's relative links become absolute, since an index shows it
alone, and it gets badges; pyproject.toml gets the project's addresses, which a copy does not know.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def absolute(readme: str, url: str, tag: str) -> str:
    """The README with links to the repository at a tag; pictures are linked as such."""

    def link(match: re.Match[str]) -> str:
        picture, label, target = match.groups()
        if re.match(r"[a-z]+:|#", target):
            return match.group()
        return f"{picture}[{label}]({url}/{'raw' if picture else 'blob'}/{tag}/{target})"

    return re.sub(r"(!?)\[((?:[^\[\]]|!\[[^\]]*\]\([^)]*\))*)\]\(([^)\s]+)\)", link, readme)


def with_badges(readme: str, url: str, tag: str) -> str:
    """The README with badges below its title."""
    shields, workflow = "https://img.shields.io/pypi", f"{url}/actions/workflows/ci.yml"
    badges = {
        "Version": (f"{shields}/v/gradtools", f"{url}/releases"),
        "Python": (f"{shields}/pyversions/gradtools", f"{url}/blob/{tag}/docs/versions.md"),
        "CI": (f"{workflow}/badge.svg", workflow),
        "License": (f"{shields}/l/gradtools", f"{url}/blob/{tag}/LICENSE"),
    }
    lines = [f"[![{name}]({picture})]({target})" for name, (picture, target) in badges.items()]
    title, rest = readme.split("\n", 1)
    return "\n".join([title, "", *lines, rest])


def with_urls(pyproject: str, url: str, tag: str) -> str:
    """pyproject.toml with the project's addresses."""
    urls = {"Source": "", "Documentation": "/tree/TAG/docs", "Issues": "/issues"}
    urls["Changelog"] = "/blob/TAG/CHANGELOG.md"
    lines = [f'{name} = "{url}{path.replace("TAG", tag)}"' for name, path in urls.items()]
    head = "[project.scripts]"
    return pyproject.replace(head, "\n".join(["[project.urls]", *lines, "", head]), 1)


def with_version(text: str, url: str, tag: str) -> str:
    """`gradtools/__init__.py` or CITATION.cff with the version of a tag such as v1.2.3."""
    if not re.fullmatch(r"v\d+\.\d+\.\d+((a|b|rc)\d+)?", tag):
        raise SystemExit(f"the tag {tag} is no version; expected one such as v1.2.3 or v1.2.3rc1")
    return re.sub(r'^(__version__ = "|version: )[\w.]+', rf"\g<1>{tag[1:]}", text, flags=re.M)


FILES = {
    "README.md": lambda *of: with_badges(absolute(*of), *of[1:]),
    "pyproject.toml": with_urls,
    "gradtools/__init__.py": with_version,
    "CITATION.cff": with_version,
}


def main() -> None:
    """Rewrites the files in place."""
    for name, change in FILES.items():
        path = ROOT / name
        path.write_text(change(path.read_text(encoding="utf-8"), *sys.argv[1:]), encoding="utf-8")


if __name__ == "__main__":
    main()
