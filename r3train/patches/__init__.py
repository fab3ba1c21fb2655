"""Changes of dependencies and of the whole process: one checked call for each, and one list of them.

``patch`` refuses an original that is not the one its replacement was written for, so that another version of torch,
Megatron-Core or SGLang ends in one line and not in other numbers.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

# what ``described`` says of no attribute, and of a function in C that does not tell its parameters
ABSENT, BUILTIN = "absent", "built in"
_MISSING = object()


@dataclass(frozen=True)
class Patch:
    """A change in this process."""

    place: str
    """What is changed: ``torch.cuda.stream``; of one object ``torch.nn.Linear().forward``."""
    why: str
    expects: str | None = None
    found: str | None = None
    original: Any = _MISSING
    """What the owner's own namespace held."""
    replacement: Any = _MISSING

    @property
    def fits(self) -> bool:
        """Tell whether the original is the one that was expected."""
        if self.expects is None or self.found is None:
            return True
        begin, dots, _ = self.expects.partition("...")
        return self.found.startswith(begin) if dots else self.found == self.expects


_patches: dict[str, Patch] = {}  # by place
_refuses = True


def patch(owner: Any, name: str, replacement: Any, *, expects: str | None, why: str) -> None:
    """Replace an attribute of a module, a class or an object.

    expects: the original as ``described``; ``(a, ...)`` takes any parameters after these, and None anything: for hooks
    of Python, which others may have set before.  why: one line for ``r3train doctor``.  Called again with the same
    ``why`` it takes the new replacement.  Raises RuntimeError if the original differs, or another patch is there.
    """
    place, original = f"{_named(owner)}.{name}", vars(owner).get(name, _MISSING)
    before = _patches.get(place)
    if before is not None and original is before.replacement is not _MISSING:
        if before.why != why:
            raise RuntimeError(f"{place} is replaced already ({before.why}); now again: {why}")
        found, original = before.found, before.original
    else:
        found = described(getattr(owner, name, _MISSING))
    # of an object nothing is kept: it may be a model
    kept = (original, replacement) if isinstance(owner, (ModuleType, type)) else ()
    _check(Patch(place, why, expects, found, *kept))
    setattr(owner, name, replacement)


def undo(owner: Any, name: str) -> None:
    """Put an attribute of a module or a class back as it was before ``patch``; the list keeps its line."""
    original = _patches[f"{_named(owner)}.{name}"].original
    if original is _MISSING:
        delattr(owner, name)
    else:
        setattr(owner, name, original)


@contextmanager
def patched(
    owner: Any, name: str, replacement: Any, *, expects: str | None, why: str
) -> Iterator[None]:
    """``patch`` for the time of the block."""
    patch(owner, name, replacement, expects=expects, why=why)
    try:
        yield
    finally:
        undo(owner, name)


def overrides(owner: Any, name: str, *, expects: str, why: str) -> None:
    """Check and list a private method that a class of ours overrides; raises as ``patch`` does."""
    _check(
        Patch(f"{_named(owner)}.{name}", why, expects, described(getattr(owner, name, _MISSING)))
    )


def _check(change: Patch) -> None:
    if _refuses and not change.fits:
        raise RuntimeError(
            f"{change.place} is {change.found}, and r3train replaces one that is {change.expects} ({change.why}): install"
            " the versions of requirements/constraints.txt"
        )
    _patches[change.place] = change


def stand_in(name: str, module: ModuleType | None, why: str) -> None:
    """Let imports of a module find another one, or none."""
    note(f"sys.modules[{name!r}]", why)
    sys.modules[name] = module


@contextmanager
def without_module(name: str, why: str) -> Iterator[None]:
    """Let nobody import a module within the block, unless it is imported already."""
    if name in sys.modules:
        yield
        return
    stand_in(name, None, why)
    try:
        yield
    finally:
        del sys.modules[name]


def note(place: str, why: str) -> None:
    """List a change of the whole process that is made by a public call or in a table."""
    _patches[place] = Patch(place, why)


def noted() -> list[Patch]:
    """Return all changes in this process, in the order of their making."""
    return list(_patches.values())


@contextmanager
def without_refusals() -> Iterator[None]:
    """Let the block make patches of other originals too, to list them all."""
    global _refuses
    _refuses = False
    try:
        yield
    finally:
        _refuses = True


def described(value: Any) -> str:
    """Say what an original is: a function or class by its parameters without annotations, another value by its type.

    >>> described(without_refusals), described(3)
    ('()', 'int')
    """
    if value is _MISSING:
        return ABSENT
    if not callable(value):
        return type(value).__name__
    try:
        signature = inspect.signature(value)
    except ValueError:
        return BUILTIN
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=signature.empty))


def _named(owner: Any) -> str:
    if isinstance(owner, ModuleType):
        return owner.__name__
    if isinstance(owner, type):
        return f"{owner.__module__}.{owner.__qualname__}"
    return f"{_named(type(owner))}()"
