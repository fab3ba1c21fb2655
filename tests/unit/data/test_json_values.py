"""Labels and metadata are JSON when they are read, or refused by file, row and key."""

from __future__ import annotations

import datetime
import decimal
import json

import pytest

from r3train.config.data_settings import DataSection, PromptFile
from r3train.data.prompts import load_prompts
from tests.unit.data.test_special_tokens import tokenizer as make_tokenizer
from tests.unit.rewards.test_scoring import sample, scored, settings


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def read(path, tokenizer, **more):
    data = DataSection(prompt_data=str(path), **more)
    return load_prompts(PromptFile(path), data, tokenizer, (100, "test"))


def rows(tmp_path, *contents):
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps({"input": "cat"} | row) + "\n" for row in contents))
    return path


def parquet(tmp_path, **columns):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "p.parquet"
    count = len(next(iter(columns.values())))
    pq.write_table(pa.table({"input": ["cat"] * count, **columns}), path)
    return path


def test_a_whole_number_of_a_float_column_is_an_integer_and_nan_is_missing(tmp_path, tokenizer):
    path = parquet(tmp_path, label=[36.0, float("nan"), None, 0.5])
    found = [prompt.label for prompt in read(path, tokenizer)]
    assert list(map(repr, found)) == ["36", "None", "None", "0.5"]
    answer = sample("36", label=found[0])
    assert scored(settings(rm_type="exact_match"), answer) == [1.0]


def test_a_decimal_label_is_a_number(tmp_path, tokenizer):
    path = parquet(tmp_path, label=[decimal.Decimal("36.00"), decimal.Decimal("0.50")])
    assert [repr(prompt.label) for prompt in read(path, tokenizer)] == ["36", "0.5"]


def test_a_nan_of_json_is_missing_in_labels_and_metadata(tmp_path, tokenizer):
    path = rows(tmp_path, {"label": float("nan"), "metadata": {"a": [float("nan"), 1.0]}})
    (prompt,) = read(path, tokenizer)
    assert prompt.label is None and prompt.metadata == {"a": [None, 1.0]}


@pytest.mark.parametrize(
    "value, kind",
    [
        (datetime.datetime(2026, 1, 2), "datetime"),
        (datetime.date(2026, 1, 2), "date"),
        (datetime.timedelta(1), "timedelta"),
        (decimal.Decimal("1.5"), "Decimal"),
        (b"ab", "bytes"),
    ],
)
def test_metadata_that_json_has_no_form_for_is_refused_by_row_and_key(
    tmp_path, tokenizer, value, kind
):
    path = parquet(tmp_path, metadata=[{"a": [{"when": value}]}])
    with pytest.raises(ValueError, match=rf"p.parquet row 1: key metadata.a\[0\].when is .*{kind}"):
        read(path, tokenizer)


@pytest.mark.parametrize(
    "row, message",
    [
        ({"label": "a\ud800"}, "key label: character 2 is .*half of a surrogate pair"),
        ({"label": ["x", "\udc00"]}, r"key label\[1\]: character 1 is "),
        ({"metadata": {"a": "\ud800"}}, "key metadata.a: character 1 is "),
        ({"label": float("inf")}, "key label is inf"),
        ({"metadata": {"a": float("-inf")}}, "key metadata.a is -inf"),
    ],
)
def test_text_and_numbers_that_cannot_be_saved_are_refused(tmp_path, tokenizer, row, message):
    with pytest.raises(ValueError, match=f"p.jsonl:2: {message}"):
        read(rows(tmp_path, {}, row), tokenizer)
