"""mkdocs.yml leads to every page once, in the order of docs/README.md."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def _pages(nav: list | str) -> list[str]:
    """Return the pages of a part of the navigation, a list of {title: part} or a page."""
    if isinstance(nav, str):
        return [nav]
    return [page for entry in nav for part in entry.values() for page in _pages(part)]


def test_the_navigation_holds_every_page_once_in_the_order_of_the_list_of_guides():
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    pages = _pages(yaml.safe_load(text))
    linked = re.findall(r"^\| \[.*?\]\((.*?)\)", (DOCS / "README.md").read_text(), re.M)
    assert pages == ["README.md", *linked]
    assert sorted(pages) == sorted(p.relative_to(DOCS).as_posix() for p in DOCS.rglob("*.md"))
