"""The tokenizer of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


def load_tokenizer(path: Path | str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a local checkpoint directory; nothing is fetched, no code is run.

    Raises ValueError naming the directory if it holds no tokenizer or a broken one.
    """
    directory = Path(path)
    if not any((directory / name).is_file() for name in TOKENIZER_FILES):
        raise ValueError(
            f"{directory}: no tokenizer there, looked for {', '.join(TOKENIZER_FILES)}"
        )
    from r3train.torchvision_stub import declare_torchvision_ops

    declare_torchvision_ops()
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # transformers and tokenizers raise bare Exception for a bad file
        raise ValueError(f"{directory}: cannot load the tokenizer: {error}") from error
