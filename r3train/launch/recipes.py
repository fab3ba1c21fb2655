"""Recipes: TOML files of whole runs, found by path or by bare name."""

from __future__ import annotations

from pathlib import Path

from r3train.config.sources import ConfigError, nearest

PACKAGE = Path(__file__).resolve().parents[1]
# where a bare name is looked for: the package's own recipes, and those of a checkout
FOLDERS = (PACKAGE / "recipes", PACKAGE.parent / "configs")


def recipe_path(name_or_path: str | Path) -> Path:
    """Return the TOML file of a recipe; raises ConfigError where there is none.

    A file of this path comes first, then NAME.toml of ``FOLDERS`` in their order.
    """
    given = Path(name_or_path)
    candidates = [given]
    if given.name == str(name_or_path):  # a bare name
        candidates += [folder / f"{given}.toml" for folder in FOLDERS]
    for file in candidates:
        if file.is_file():
            return file
    raise ConfigError(
        f"{given}: no such file, and no recipe of this name.{nearest(str(given), recipe_names())}"
    )


def recipe_names() -> list[str]:
    """Return the bare names of all recipes, sorted."""
    return sorted({file.stem for folder in FOLDERS for file in folder.glob("*.toml")})
