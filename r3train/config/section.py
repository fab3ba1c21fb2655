"""The base of every section of the configuration."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


# a value of a table whose names are another program's
OverrideScalar = bool | int | float | str


class Section(BaseModel):
    """A TOML table and a group of flags: frozen, strictly typed, without unknown keys.

    The string under a field is its text in ``--help`` and in docs/configuration.md.
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

    def changed(self) -> list[str]:
        """Return the names of the settings that are not at their defaults."""
        return [n for n, f in type(self).model_fields.items() if getattr(self, n) != f.default]
