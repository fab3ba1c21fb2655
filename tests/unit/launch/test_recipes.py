"""A recipe is found by its path, or by its bare name among the package's and the checkout's."""

from __future__ import annotations

import pytest

from r3train.launch import recipes
from r3train.launch.recipes import recipe_names, recipe_path


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Two folders of recipes, and a third one to work in."""
    for name in ("package", "checkout", "here"):
        (tmp_path / name).mkdir()
    for file in ("package/both.toml", "checkout/both.toml", "checkout/only.toml", "here/both"):
        (tmp_path / file).touch()
    monkeypatch.setattr(recipes, "FOLDERS", (tmp_path / "package", tmp_path / "checkout"))
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


def test_a_bare_name_is_a_file_here_or_a_recipe_of_the_package_before_those_of_a_checkout(folders):
    assert recipe_path("both").resolve() == folders / "here/both"
    (folders / "here/both").unlink()
    assert recipe_path("both") == folders / "package/both.toml"
    assert recipe_path("only") == folders / "checkout/only.toml"
    assert recipe_path(folders / "checkout/both.toml") == folders / "checkout/both.toml"
    assert recipe_names() == ["both", "only"]


@pytest.mark.parametrize(
    "given, said",
    [
        ("onyl", r"^onyl: no such file, and no recipe of this name\. Did you mean only\?$"),
        ("elsewhere/both", r"^elsewhere/both: no such file, and no recipe of this name\.$"),
        ("..", r"^\.\.: no such file"),
    ],
)
def test_what_is_neither_a_file_nor_a_recipe_is_refused(given, said, folders):
    with pytest.raises(ValueError, match=said):
        recipe_path(given)
