"""The model that the tests of rows read."""

from __future__ import annotations

import pytest

from r3train.verify.tiny import TinyOptions, TrainedTokenizer, build
from tests.unit.data.brought_in import jsonl, with_template


@pytest.fixture(scope="session")
def chat(tmp_path_factory):
    """A model whose tokenizer knows every text, with a chat template."""
    directory = tmp_path_factory.mktemp("chat")
    corpus = jsonl(directory, {"input": "What is 12 times 3? It is 36."})
    trained = TrainedTokenizer(corpus, chat_template=True)
    build(directory / "tiny", TinyOptions(vocab_size=512), force=True, tokenizer=trained)
    return directory / "tiny" / "model"


@pytest.fixture
def model(chat, tmp_path):
    return with_template(chat, tmp_path)
