"""The prompts of a file, with settings by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from r3train.config.data_settings import DataSection, PromptFile
from r3train.data.prompts import load_prompts
from r3train.types import Prompt


def all_prompts(
    path: Path,
    tokenizer: Any,
    *,
    rows: tuple[int, int | None] = (0, None),
    limit: tuple[int, str] = (1 << 20, "no limit"),
    tools: Any = (),
    stop_token_ids: Any = (),
    notes: list[str] | None = None,
    **settings: Any,
) -> list[Prompt]:
    """Load what ``load_prompts`` does; settings: of the section of the data."""
    data = DataSection(prompt_data=str(path), **settings)
    kept = [] if notes is None else notes

    def note(text: str, remedy: str) -> None:
        kept.append(text)

    options = {"tools": tools, "stop_token_ids": stop_token_ids, "note": note}
    return load_prompts(PromptFile(path, *rows), data, tokenizer, limit, **options)
