"""A recipe is found by its path, or by its bare name."""

from __future__ import annotations

import pytest

from r3train.config import recipes
from r3train.config.recipes import recipe_names, recipe_path


@pytest.fixture
def package(tmp_path, monkeypatch):
    """The package's recipes ``one`` and ``both``, and a directory to work in that holds a file ``both``."""
    for name in ("package", "here"):
        (tmp_path / name).mkdir()
    for file in ("package/both.toml", "package/one.toml", "here/both"):
        (tmp_path / file).touch()
    monkeypatch.setattr(recipes, "RECIPES", tmp_path / "package")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "package"


def test_a_bare_name_is_a_file_here_before_a_recipe_of_the_package(package):
    assert recipe_path("both").resolve() == package.parent / "here/both"
    assert recipe_path("one") == package / "one.toml"
    assert recipe_path(package / "both.toml") == package / "both.toml"
    assert recipe_names() == ["both", "one"]


@pytest.mark.parametrize(
    "given, said",
    [
        ("oen", r"^oen: no such file, and no recipe of this name .*\. Did you mean one\?$"),
        ("elsewhere/one", r"^elsewhere/one: no such file, and no recipe of this name [^?]*\.$"),
        ("../package/one", r"^\.\./package/one: no such file"),
    ],
)
def test_what_is_neither_a_file_nor_a_recipe_is_refused(given, said, package):
    with pytest.raises(ValueError, match=said):
        recipe_path(given)
