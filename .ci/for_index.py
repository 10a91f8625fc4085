"""Prepares a release for a package index: ``python .ci/for_index.py REPOSITORY_URL TAG``.

The README's relative links become absolute, since an index shows it alone, and pyproject.toml gets
the project's addresses, which a copy of the repository does not know.
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


def with_urls(pyproject: str, url: str, tag: str) -> str:
    """pyproject.toml with the project's addresses."""
    urls = {"Source": "", "Documentation": "/tree/TAG/docs", "Issues": "/issues"}
    urls["Changelog"] = "/blob/TAG/CHANGELOG.md"
    lines = [f'{name} = "{url}{path.replace("TAG", tag)}"' for name, path in urls.items()]
    head = "[project.scripts]"
    return pyproject.replace(head, "\n".join(["[project.urls]", *lines, "", head]), 1)


def main() -> None:
    """Rewrites both files in place."""
    url, tag = sys.argv[1:]
    for name, change in (("README.md", absolute), ("pyproject.toml", with_urls)):
        path = ROOT / name
        path.write_text(change(path.read_text(encoding="utf-8"), url, tag), encoding="utf-8")


if __name__ == "__main__":
    main()
