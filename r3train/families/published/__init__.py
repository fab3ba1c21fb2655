"""Published models by the keys of their config.json: NAME/config.json holds them, written by us.

An estimate needs no more of a model, and no download.
"""

from __future__ import annotations

from pathlib import Path

PUBLISHED = Path(__file__).parent


def published_names() -> list[str]:
    """Return the names of the models, sorted."""
    return sorted(file.parent.name for file in PUBLISHED.glob("*/config.json"))


def config_directory(hf_checkpoint: Path) -> tuple[Path, str]:
    """Return the directory of a checkpoint's config.json, and a note where the package's stands for it.

    The package's is that of the published model whose name the directory's name begins with, as
    models/Qwen3-30B-A3B-Instruct-2507 does with Qwen3-30B-A3B.  Raises ValueError where there is none.
    """
    if (hf_checkpoint / "config.json").exists():
        return hf_checkpoint, ""
    name = f"{hf_checkpoint.name}-"
    known = [model for model in published_names() if name.startswith(f"{model}-")]
    if not known:
        raise ValueError(
            f"{hf_checkpoint}/config.json: no such file (hf_checkpoint), and no published model of the package"
            f" has this name: {', '.join(published_names())}"
        )
    model = max(known, key=len)
    return PUBLISHED / model, f"{hf_checkpoint}: not here; {model}'s published config.json counts"
