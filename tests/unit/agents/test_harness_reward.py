"""Rewards that harnesses write: numbers and tables of them, from regular files."""

import os

import pytest

from r3train.agents.harness_reward import read_reward, read_reward_file


@pytest.mark.parametrize(
    "content, reward",
    [
        (b"1", 1.0),
        (b" 0.5\n", 0.5),
        (b"-2e-3", -0.002),
        (b'{"a": 1, "b": 0.5}', {"a": 1.0, "b": 0.5}),
    ],
)
def test_a_reward_is_read(content, reward):
    assert read_reward(content) == reward


@pytest.mark.parametrize(
    "content, what",
    [
        (b"", "expected a number or a JSON table"),
        (b"good", "b'good'"),
        (b"\xff", "expected a number"),
        (b"NaN", "finite"),
        (b"-Infinity", "finite"),
        (b"1" + b"0" * 400, "finite"),
        (b"true", "True"),
        (b'"1"', "'1'"),
        (b"null", "None"),
        (b"[1]", r"\[1\]"),
        (b"{}", "at least one"),
        (b'{"a": {"b": 1}}', "of 'a'"),
        (b'{"a": NaN}', "of 'a' nan: expected a finite"),
        (b"[" * 60000, "expected a number"),
        (b" " * 65536 + b"1", "65537 bytes"),
    ],
)
def test_what_is_no_reward_is_refused_in_one_line(content, what):
    with pytest.raises(ValueError, match=what) as error:
        read_reward(content)
    assert "\n" not in str(error.value)


def test_a_file_is_read_and_its_absence_is_no_reward(tmp_path):
    assert read_reward_file(tmp_path / "reward") is None
    (tmp_path / "reward").write_text("1\n")
    assert read_reward_file(tmp_path / "reward") == 1.0


def _link(path):
    path.with_name("other").write_text("1")
    path.symlink_to(path.with_name("other"))


@pytest.mark.parametrize(
    "make, what",
    [
        (_link, "cannot be read"),
        (lambda path: path.mkdir(), "no regular file"),
        (os.mkfifo, "no regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "cannot be read"),
        (lambda path: path.write_text("x"), "b'x'"),
        (lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 1 << 40), "65537 bytes"),
    ],
    ids=["link", "directory", "pipe", "device", "text", "endless"],
)
def test_a_file_that_is_no_reward_is_refused_by_its_path(tmp_path, make, what):
    make(tmp_path / "reward")
    with pytest.raises(ValueError, match=f"^{tmp_path}/reward: .*{what}"):
        read_reward_file(tmp_path / "reward")
