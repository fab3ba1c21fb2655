"""Write the flags of docs/reference/compare.md from r3train/config/peers.toml; --check fails where they are stale."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from r3train.config import RunConfig
from r3train.config.peers import FRAMEWORKS
from r3train.config.sources import flag_name, places

PAGE = Path(__file__).parent / "reference/compare.md"
MARK = "<!-- From here on written by docs/write_compare.py (`make docs`). Do not edit. -->\n"
# fields of one word that tables name; other words stay words
SINGLE = {"colocate", "environment", "load", "lr", "save", "tensorboard"}


def page(text: str) -> str:
    """Return the page with its part below the mark written anew."""
    by_hand, mark, _ = text.partition(MARK)
    assert mark, f"{PAGE} has lost its mark"
    parts = [by_hand + mark]
    for framework, names in FRAMEWORKS.items():
        parts += [f"### {framework}", "", "| there | here |", "|---|---|"]
        parts += [f"| `{there}` | {in_flags(here)} |" for there, here in sorted(names.items())]
        parts.append("")
    return "\n".join(parts)


def in_flags(here: str) -> str:
    """Return our setting with every field as its flag, in code."""
    here = re.sub("r3train train --\\S+|\\[\\[.*]]|[A-Z_]{6,}|config.json", r"`\g<0>`", here)
    known = places(RunConfig)
    return re.sub(r"(?<!`)\b[a-z]\w+\b", lambda word: _flag(word[0], known), here)


def _flag(word: str, known: dict) -> str:
    is_field = "_" in word and (word in known or word.startswith("sglang_")) or word in SINGLE
    return f"`{flag_name(word)}`" if is_field else word


def main() -> None:
    """Write the page, or check it."""
    text = PAGE.read_text(encoding="utf-8")
    if "--check" not in sys.argv:
        PAGE.write_text(page(text), encoding="utf-8")
    elif page(text) != text:
        sys.exit(f"{PAGE} is not what r3train/config/peers.toml says: run `make docs`")


if __name__ == "__main__":
    main()
