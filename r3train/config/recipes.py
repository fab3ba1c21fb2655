"""Recipes: TOML files of whole runs, found by path or by bare name."""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path

from r3train.config.files import path_hint
from r3train.config.sources import ConfigError, nearest

# configs/ of a checkout, which a wheel carries
RECIPES = Path(__file__).resolve().parents[1] / "recipes"


def recipe_path(name_or_path: str | Path) -> Path:
    """Return the TOML file of a recipe; raises ConfigError where there is none.

    A file of this path comes first, then the package's recipe of this name.
    """
    given = Path(name_or_path)
    if given.exists():  # not a regular file only: a shell's <(...) is a pipe
        return given
    recipe = RECIPES / f"{given}.toml"
    if recipe.parent == RECIPES and recipe.is_file():
        return recipe
    raise ConfigError(
        f"{given}: no such file, and no recipe of this name (r3train recipes lists them)"
        f"{path_hint(given)}.{nearest(str(given), recipe_names(), 0.6)}"
    )


def recipe_names() -> list[str]:
    """Return the bare names of all recipes, sorted."""
    return sorted(file.stem for file in RECIPES.glob("*.toml"))


def recipe_line(name: str) -> str:
    """Return the first sentence of a recipe's leading comment."""
    lines = (RECIPES / f"{name}.toml").read_text(encoding="utf-8").splitlines()[1:]
    head = takewhile(lambda line: line.startswith("# "), lines)
    return " ".join(line[2:] for line in head).split(". ")[0].rstrip(".")
