"""The tokenizer of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from r3train.families.hf_facts import HfModelFacts
from r3train.config.files import load_json_object
from r3train.cpu.torchvision_stub import declare_torchvision_ops

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# tenfold the largest published vocabulary
_MOST_ID = 10_000_000
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
    if (directory / "tokenizer.json").is_file():
        _check_ids(directory / "tokenizer.json")
    try:
        tokenizer = _loader(directory).from_pretrained(directory, local_files_only=True)
        tokenizer.encode("a")  # a length that is no number shows at the first use
        return tokenizer
    except Exception as error:  # transformers and tokenizers raise bare Exception for a bad file
        raise ValueError(f"{directory}: cannot load the tokenizer: {error}") from error


def _loader(directory: Path) -> Any:
    """Return the class that loads the tokenizer; AutoTokenizer's import takes torch and seconds."""
    file = directory / "tokenizer_config.json"
    if file.is_file() and load_json_object(file).get("tokenizer_class") == "TokenizersBackend":
        # tokenizer.json as it is: for some model types, Qwen3.5's among them, AutoTokenizer takes
        # another class
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    declare_torchvision_ops()
    from transformers import AutoTokenizer

    return AutoTokenizer


def _check_ids(file: Path) -> None:
    """Raise ValueError for an id for which the tokenizers library would take gigabytes."""
    content = load_json_object(file)
    model, added = content.get("model"), content.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    numbers = list(vocabulary.values()) if isinstance(vocabulary, dict) else []
    numbers += [
        token.get("id")
        for token in (added if isinstance(added, list) else ())
        if isinstance(token, dict)
    ]
    for number in numbers:
        if type(number) is not int or not 0 <= number <= _MOST_ID:
            raise ValueError(f"{file}: a token has the id {number!r}, expected 0 to {_MOST_ID}")


def stop_token(text: str, tokenizer: Any) -> int:
    """The token of --rollout-stop TEXT; raises ValueError unless TEXT is a token of its own."""
    token = tokenizer.get_added_vocab().get(text)
    if token is None:
        raise ValueError(
            f"--rollout-stop {text!r} is not one of the tokenizer's added tokens: servers have no"
            " tokenizer here and stop at tokens only; add the token, or score the text up to it"
        )
    return token


def check_vocabulary(tokenizer: Any, hf: HfModelFacts) -> None:
    """Raise ValueError for a tokenizer whose tokens the model does not have."""
    count = max(len(tokenizer), 1 + max(tokenizer.get_vocab().values(), default=-1))
    if count > hf.vocab_size:
        raise ValueError(
            f"{hf.path}: the tokenizer has {count} tokens, the model has {hf.vocab_size}: ids"
            " past them crash it; copy the tokenizer files of the model's own release there"
        )
