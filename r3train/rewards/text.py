"""Rewards for multiple choice and for words."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

from r3train.rewards.answers import TAIL, last_box, written
from r3train.rewards.reward import bad_label
from r3train.types import Prompt

_LETTERS = string.ascii_uppercase
# without choices in the metadata: no data set of this kind has more
_MOST_CHOICES = 10
_STATED = re.compile(
    r"(?i:answer|option|choice)\s*(?i:is|:)?\s*[*_$(\\]*\s*(?:boxed\{)?\(?([A-Z])\b"
)
_ALONE = re.compile(r"\b([A-Z])\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")


def gpqa(prompt: Prompt, text: str) -> float:
    """1 where the response chose the right letter of several choices, else 0.

    The label is a letter, a 0-based number of a choice, or the text of one of ``metadata["choices"]``.
    The letter is taken from the last box, else from the last "answer is X", else it is the last letter
    that stands alone.  Nothing before ``</think>`` counts.
    """
    letters, right = choices(prompt)
    tail = text.rpartition("</think>")[2][-TAIL:]
    found = [(last_box(tail) or "").strip("() .").upper()]
    found += _STATED.findall(tail)[::-1] + _ALONE.findall(tail)[::-1]
    return float(next((letter for letter in found if letter in letters), None) == right)


def choices(prompt: Prompt) -> tuple[Sequence[str], str]:
    """The letters that may be chosen and the right one; raises ValueError naming the prompt."""
    texts, label = prompt.metadata.get("choices"), prompt.label
    if isinstance(texts, dict):
        texts = list(texts.values())
    letters = list(_LETTERS[: len(texts) if texts else _MOST_CHOICES])
    if isinstance(label, str):
        if label.strip().upper() in letters:
            return letters, label.strip().upper()
        if texts and label in texts:
            return letters, letters[texts.index(label)]
    elif (number := written(label)) in map(str, range(len(letters))):
        return letters, letters[int(number)]
    needs = f"one of {letters[0]} to {letters[-1]}, a number below {len(letters)}"
    raise bad_label(prompt, f"gpqa needs a label that is {needs} or one of metadata.choices")


def f1(prompt: Prompt, text: str) -> float:
    """F1 of the words that response and label share, in 0..1, as SQuAD computes it.

    Case and articles do not count, and punctuation is deleted: ``U.S.`` is ``us``, ``1,000`` is ``1000``.  Of several labels (a list) the best counts.
    """
    labels = prompt.label if isinstance(prompt.label, list) else [prompt.label]
    texts = [written(label) for label in labels]
    if not texts or None in texts:
        raise bad_label(prompt, "f1 needs a label of text or a list of texts")
    return max(_word_f1(_words(text), _words(label)) for label in texts)


def _words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def _word_f1(answer: list[str], label: list[str]) -> float:
    shared = sum((Counter(answer) & Counter(label)).values())
    if not answer or not label:
        return float(answer == label)
    return 2 * shared / (len(answer) + len(label))
