"""Addresses of servers in a file, or in the files of a directory."""

from __future__ import annotations

import os

import pytest

from r3train.engine.address_files import read_addresses


def test_a_file_names_a_server_in_each_line(tmp_path):
    file = tmp_path / "servers"
    file.write_text("h1:30000\n\nhttp://h2:30001\n")
    assert read_addresses(file) == {"http://h1:30000", "http://h2:30001"}
    file.write_text("")
    assert read_addresses(file) == set()


def test_a_directory_has_a_file_for_each_server_and_what_is_being_written_is_not_read(tmp_path):
    (tmp_path / "a").write_text("h1:1\n")
    (tmp_path / "b.1234.tmp").write_text("h2:")
    (tmp_path / "..data").mkdir()
    (tmp_path / "..data" / "c").write_text("h3:3")
    (tmp_path / "c").symlink_to("..data/c")  # as Kubernetes mounts a ConfigMap
    assert read_addresses(tmp_path) == {"http://h1:1", "http://h3:3"}


@pytest.mark.parametrize("text", ["h1", "h1:30000 h2", "http://h1/"])
def test_an_address_without_a_port_is_refused(text, tmp_path):
    (tmp_path / "f").write_text(text)
    with pytest.raises(ValueError, match="has no port"):
        read_addresses(tmp_path / "f")


def test_a_missing_file_a_pipe_and_a_directory_in_a_directory_are_errors_and_no_wait(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "missing", tmp_path / "pipe", tmp_path):
        with pytest.raises(OSError):
            read_addresses(path)


@pytest.mark.parametrize("mode", [0o620, 0o602])
@pytest.mark.parametrize("of_directory", [False, True])
def test_what_others_may_write_is_refused_for_each_name_gets_the_key(mode, of_directory, tmp_path):
    (tmp_path / "a").write_text("h1:1")
    changed = tmp_path if of_directory else tmp_path / "a"
    changed.chmod(mode | 0o100 * of_directory)
    with pytest.raises(PermissionError, match="key"):
        read_addresses(tmp_path)
    if not of_directory:
        with pytest.raises(PermissionError, match="key"):
            read_addresses(tmp_path / "a")


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives a file to somebody else")
def test_what_another_user_owns_is_refused(tmp_path):
    (tmp_path / "a").write_text("h1:1")
    os.chown(tmp_path / "a", 1234, -1)
    with pytest.raises(PermissionError, match="1234"):
        read_addresses(tmp_path / "a")
