"""A patch is made on the original that it was written for, and on no other."""

from __future__ import annotations

import functools
import sys
from types import ModuleType, SimpleNamespace

import pytest

from r3train import patches
from r3train.patches import ABSENT, BUILTIN, described, note, noted, overrides, patch, patched, undo


class Library:
    def method(self, x: int, *, y: str = "a") -> None: ...

    @staticmethod
    def static(x): ...


class Heir(Library): ...


@pytest.fixture
def library(monkeypatch):
    """A module of somebody's."""
    monkeypatch.setattr(patches, "_patches", {})
    module = ModuleType("library")
    module.function = lambda a, b=None: "theirs"
    module.flag = False
    return module


def ours(*_, **__):
    return "ours"


def test_a_replacement_takes_the_place_of_the_expected_original_and_is_listed(library):
    patch(library, "function", ours, expects="(a, b=None)", why="it is wrong")
    assert library.function(1) == "ours"
    (found,) = noted()
    assert (found.place, found.why, found.fits) == ("library.function", "it is wrong", True)


@pytest.mark.parametrize(
    "name, expects, found",
    [
        ("function", "(a)", "(a, b=None)"),
        ("function", "(a, b=0)", "(a, b=None)"),
        ("function", "(b, ...)", "(a, b=None)"),
        ("function", BUILTIN, "(a, b=None)"),
        ("function", ABSENT, "(a, b=None)"),
        ("flag", "str", "bool"),
        ("gone", "(a, b=None)", "absent"),
    ],
)
def test_another_original_is_refused_by_name_and_stays(name, expects, found, library):
    before = dict(vars(library))
    with pytest.raises(RuntimeError) as error:
        patch(library, name, ours, expects=expects, why="it is wrong")
    assert str(error.value) == (
        f"library.{name} is {found}, and r3train replaces one that is {expects} (it is wrong):"
        " install the versions of requirements/constraints.txt"
    )
    assert vars(library) == before and not noted()


@pytest.mark.parametrize(
    "value, text",
    [
        (Library.method, "(self, x, *, y='a')"),
        (Library().method, "(x, *, y='a')"),
        (functools.partial(Library.method, None, y="b"), "(x, *, y='b')"),
        (Library, "()"),
        (type, BUILTIN),
        (None, "NoneType"),
        (sys, "module"),
    ],
)
def test_what_an_original_is_said_to_be(value, text):
    assert described(value) == text


def test_an_absent_name_a_flag_and_any_further_parameters_can_be_expected(library):
    patch(library, "new", None, expects=ABSENT, why="a")
    patch(library, "flag", True, expects="bool", why="b")
    patch(library, "function", ours, expects="(a, ...)", why="c")
    assert library.new is None and library.flag is True and library.function() == "ours"


def test_a_second_patch_renews_the_first_and_another_one_is_refused(library):
    theirs = library.function
    patch(library, "function", ours, expects="(a, b=None)", why="it is wrong")
    patch(library, "function", lambda: "newer", expects="(a, b=None)", why="it is wrong")
    assert library.function() == "newer" and len(noted()) == 1
    with pytest.raises(
        RuntimeError, match=r"replaced already \(it is wrong\); now again: it is slow"
    ):
        patch(library, "function", ours, expects="(a, b=None)", why="it is slow")
    undo(library, "function")
    assert library.function is theirs


def test_an_original_that_somebody_has_put_back_is_looked_at_anew(library):
    patch(library, "function", ours, expects="(a, b=None)", why="it is wrong")
    library.function = lambda c: "another version"
    with pytest.raises(RuntimeError, match=r"library.function is \(c\)"):
        patch(library, "function", ours, expects="(a, b=None)", why="it is wrong")


def test_a_block_leaves_the_owner_as_it_was_an_heir_without_the_name(library):
    static = vars(Library)["static"]
    for owner, name, expects in (
        (Library, "static", "(x)"),
        (Heir, "method", "(self, x, *, y='a')"),
        (library, "new", ABSENT),
    ):
        before = vars(owner).get(name, ABSENT)
        with pytest.raises(KeyError), patched(owner, name, ours, expects=expects, why="a"):
            assert getattr(owner, name)() == "ours"
            raise KeyError
        assert vars(owner).get(name, ABSENT) is before
    assert vars(Library)["static"] is static and len(noted()) == 3


def test_of_an_object_its_class_is_listed_and_nothing_is_kept(library):
    one = Library()
    patch(one, "method", ours, expects="(x, *, y='a')", why="a")
    assert one.method() == "ours" and Library().method(1) is None
    (found,) = noted()
    assert found.place == f"{__name__}.Library().method"
    assert found.original is found.replacement, "a model would never be freed"


def test_a_method_that_a_class_of_ours_overrides_is_checked(library):
    overrides(Library, "method", expects="(self, x, *, y='a')", why="a")
    with pytest.raises(RuntimeError, match="Library.renamed is absent"):
        overrides(Library, "renamed", expects="(self)", why="a")


def test_what_does_not_fit_is_listed_where_nothing_is_refused(library):
    with patches.without_refusals():
        patch(library, "function", ours, expects="(b)", why="a")
    note("a table", "b")
    assert [p.fits for p in noted()] == [False, True]
    with pytest.raises(RuntimeError):
        patch(SimpleNamespace(), "function", ours, expects="(b)", why="a")


def test_no_module_is_found_within_the_block_only(library):
    with patches.without_module("wave", "a"), pytest.raises(ImportError):
        import wave
    import wave  # noqa: F811

    with patches.without_module("wave", "a"):
        import wave as again
    assert again is wave
