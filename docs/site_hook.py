"""Give each file of the repository that a page links to a page of its own, for mkdocs (mkdocs.yml).

A link out of docs/ is good on GitHub, and leads nowhere on a site of docs/ alone.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
# ](../ROOM/FILE) of a page in docs/, ](../../ROOM/FILE) of one below it
LINK = re.compile(r"\]\((?P<up>(?:\.\./)+)(?P<path>[^)#]+)")


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the pages of files that are linked to."""
    pages = [file for file in files if file.is_documentation_page()]
    linked = {path for file in pages for path in _outside(file.src_uri, file.content_string)}
    for path in sorted(path for path in linked if (ROOT / path).is_file()):
        text = f"# {path}\n\n```{Path(path).suffix[1:]}\n{(ROOT / path).read_text()}```\n"
        page = File.generated(config, f"files/{path}.md", content=text)
        page.inclusion = InclusionLevel.NOT_IN_NAV
        files.append(page)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links out of docs/ to these pages."""
    out = "../" * (page.file.src_uri.count("/") + 1)
    there = lambda link: f"]({out[3:]}files/{link['path']}.md" if link["up"] == out else link[0]
    return LINK.sub(there, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Mark code that is short enough to stay on one line (docs/site.css)."""
    return re.sub("<code>(?=[^<]{1,28}</code>)", '<code class="whole">', html)


def _outside(page: str, markdown: str) -> set[str]:
    """Return the paths below the repository's root that a page of docs/ links to."""
    up = "../" * (page.count("/") + 1)
    return {link["path"] for link in LINK.finditer(markdown) if link["up"] == up}
