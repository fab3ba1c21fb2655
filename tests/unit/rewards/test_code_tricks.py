"""Programs that try to pass tests that they do not pass, and that fill the disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.unit.rewards.test_code import ADD_TESTS, ECHO_TESTS, reward_of

from r3train.rewards import code

# writes all that it has found to all that it can open, and ends well
SEND = """
import os, re

def send(found):
    found = {part if isinstance(part, bytes) else str(part).encode() for part in found}
    secret = re.compile(rb"[0-9a-f]{16}").fullmatch  # of an older launcher
    found = sorted(found | {b"passed", b"1"}, key=lambda part: (not secret(part), len(part)))
    me, parent = os.getpid(), os.getppid()
    fds = list(range(3, 64))
    for process in (me, parent):
        try:
            names = os.listdir(f"/proc/{process}/fd")
        except OSError:
            continue
        for name in names:
            if int(name) > 2:
                try:
                    fds.append(os.open(f"/proc/{process}/fd/{name}", os.O_WRONLY | os.O_NONBLOCK))
                except OSError:
                    pass
    for fd in fds:
        for part in found:
            try:
                os.set_blocking(fd, False)
                os.write(fd, part)
            except OSError:
                break
    os._exit(0)
"""
TRICKS = {
    "frames": """
import os, sys
frame, found = sys._getframe(), []
while frame is not None:
    for value in list(frame.f_locals.values()):
        found += [value] if isinstance(value, (str, bytes)) else []
        found += [v for v in list(value.values()) if isinstance(v, str)] if type(value) is dict else []
    frame = frame.f_back
""",
    "inspect": """
import inspect, os
found = []
for info in inspect.stack():
    for table in (info.frame.f_locals, info.frame.f_globals):
        found += [value for value in table.values() if isinstance(value, (str, bytes))]
""",
    "a traceback": """
import os
found = []
try:
    1 / 0
except ZeroDivisionError as error:
    frame = error.__traceback__.tb_frame
    while frame:
        found += [v for v in frame.f_locals.values() if isinstance(v, (str, bytes))]
        frame = frame.f_back
""",
    "gc": """
import gc, os
found = []
for each in gc.get_objects():
    inner = gc.get_referents(each)
    found += [v for v in inner if isinstance(v, (str, bytes)) and 0 < len(v) < 100]
""",
    "its own memory": """
import ctypes, os, re
found = []
for line in open("/proc/self/maps"):
    first, last = (int(n, 16) for n in line.split()[0].split("-"))
    if "rw-p" in line and last - first < 1 << 24:
        try:
            with open("/proc/self/mem", "rb") as memory:
                memory.seek(first)
                found += re.findall(rb"[0-9a-f]{16}", memory.read(last - first))
        except OSError:
            pass
""",
    "its parent's memory": """
import ctypes, os
found, parent, libc = [], os.getppid(), ctypes.CDLL(None)
held = libc.ptrace(16, parent, None, None) == 0
try:
    open(f"/proc/{parent}/mem", "rb+")
    held = True
except OSError:
    pass
assert not held, "it can change what the other process does"
""",
    "a mount": """
import ctypes, os
found = []
libc = ctypes.CDLL(None)
assert libc.mount(b"tmpfs", b"/tmp", b"tmpfs", 0, None) != 0
assert libc.umount2(os.getcwd().encode(), 2) != 0
""",
}


@pytest.mark.parametrize("name", TRICKS)
@pytest.mark.parametrize("apart", [True, False])
def test_a_program_finds_nothing_in_its_process_that_makes_it_pass(name, apart, monkeypatch):
    if not apart:
        monkeypatch.setattr(code, "isolation", lambda: ())
    program = SEND + TRICKS[name]
    assert reward_of(program + "send(found)", ["assert False"]) == 0.0
    # it is the trick that fails, and not the program
    harmless = program + "def add(a, b):\n    return a + b\n"
    assert reward_of(harmless, ADD_TESTS) == 1.0


@pytest.mark.parametrize("name", ["frames", "gc", "its own memory"])
def test_a_function_that_the_tests_call_finds_nothing_either(name):
    lines = TRICKS[name].strip().splitlines()
    body = "\n".join(f"    {line}" for line in [*lines, "send(found)"])
    program = f"{SEND}\ndef add(a, b):\n{body}\n"
    assert reward_of(program, ADD_TESTS) == 0.0


def test_a_program_reads_its_tests_nowhere_before_they_run():
    program = """
import gc, os
word = "gol" + "den"
seen = [v for o in gc.get_objects() for v in gc.get_referents(o) if isinstance(v, str) and word in v]
for fd in range(3, 64):
    try:
        seen += [fd] * (word.encode() in os.pread(fd, 1 << 20, 0))
    except OSError:
        pass
seen = [each for each in seen if each is not word]
"""
    assert reward_of(program, ["assert seen == []  # golden"]) == 1.0


@pytest.mark.parametrize("apart", [True, False])
def test_the_files_of_a_program_are_bounded_together(apart, monkeypatch, tmp_path):
    """Each is smaller than the bound of a file."""
    if not apart:
        monkeypatch.setattr(code, "isolation", lambda: ())
    elif "--mount" not in code.isolation():
        pytest.skip("not run: this machine lets nobody mount in a namespace")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(code, "DIRECTORY_BYTES", 8 << 20)
    program = """
import time
for number in range({files}):
    with open(f"file{{number}}", "wb") as file:
        file.write(bytes(1 << 20))
time.sleep({then})
{echo}
"""
    echo = "print(sum(int(word) for word in input().split()))"
    few = program.format(files=4, then=0, echo=echo)
    assert reward_of(few, ECHO_TESTS) == 1.0
    many = program.format(files=64, then=0, echo=echo)
    assert reward_of(many, ECHO_TESTS) == 0.0
    # it is ended when it has written too much
    goes_on = program.format(files=64, then=3600, echo=echo)
    assert reward_of(goes_on, ECHO_TESTS, reward_timeout_s=3000.0) == 0.0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("how", ["os.mkdir('a'); os.chdir('a')", "open(str(n), 'w')"])
def test_small_and_deep_files_count_too(how, monkeypatch, tmp_path):
    monkeypatch.setattr(code, "isolation", lambda: ())
    monkeypatch.setattr(code, "DIRECTORY_BYTES", 1 << 20)
    program = f"import os\nfor n in range(1500): {how}\n"
    assert reward_of(program + "print(3)", {"inputs": [""], "outputs": ["3"]}) == 0.0


def test_what_a_program_prints_is_bounded(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = os.statvfs(tmp_path).f_bavail
    most = []

    def fits(_directory: str) -> bool:
        most.append(os.statvfs(tmp_path).f_bavail)
        return True

    monkeypatch.setattr(code, "isolation", lambda: ())
    monkeypatch.setattr(code, "_fits", fits)
    program = "import os, signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    program += "while True:\n    try: os.write(1, bytes(1 << 20))\n    except OSError: pass"
    assert reward_of(program, {"inputs": [""], "outputs": ["x"]}, reward_timeout_s=4.0) == 0.0
    block = os.statvfs(tmp_path).f_frsize
    assert most and max(before - now for now in most) * block < 1 << 30


def test_isolation_names_a_file_system_of_its_own_where_it_can_be_had():
    if not code.isolation():
        pytest.skip("not run: this machine lets nobody make a network namespace (unshare)")
    program = "import os\nstat = os.statvfs('.')\nprint(stat.f_blocks * stat.f_frsize >> 20)"
    expected = "128" if "--mount" in code.isolation() else None
    if expected is None:
        pytest.skip("not run: this machine lets nobody mount in a namespace")
    assert reward_of(program, {"inputs": [""], "outputs": [expected]}) == 1.0
    assert Path("/proc/self/mounts").read_text().count("r3train-code") == 0, "in our own"
