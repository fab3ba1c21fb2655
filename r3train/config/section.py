"""The base of every section of the configuration, and values that several sections have."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator

from r3train.config.requirements import Requirement

# a value of a table whose names are another program's
OverrideScalar = bool | int | float | str


def _no_zero(value: int | None) -> int | None:
    if value == 0:
        raise ValueError("expected -1 (no limit) or a number from 1 up")
    return value


def each_once(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the values; raises ValueError for one that is there twice."""
    if twice := [value for value in values if values.count(value) > 1]:
        raise ValueError(f"{twice[0]} is named twice")
    return values


# a number of which -1 is no limit
LIMIT = (Field(ge=-1), AfterValidator(_no_zero))


class Section(BaseModel):
    """A TOML table and a group of flags: frozen, strictly typed, without unknown keys.

    The string under a field is its text in ``--help`` and in docs/reference/configuration.md.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        validate_default=True,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )
    # what each setting of the section asks, next to what its field says
    every_field: ClassVar[tuple[Requirement, ...]] = ()
    # settings that only tests need: they are listed in a section of their own
    test_hooks: ClassVar[tuple[str, ...]] = ()

    @field_validator("*")
    @classmethod
    def _is_whole(cls, value: Any) -> Any:
        """Raise ValueError for a path that a shell should have expanded."""
        if isinstance(value, Path) and str(value).startswith(("~", "$")):
            raise ValueError("~ and $NAME are not expanded here: write the whole path")
        return value
