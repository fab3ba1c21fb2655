"""No file of the package is read or written in the encoding of the user's locale."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from r3train.engine.server import SGLangServer

ROOT = Path(__file__).parents[2]
OPENERS = ("open", "fdopen", "NamedTemporaryFile", "read_text", "write_text")
OF_TEXT = ("", "r", "w", "a", "x", "r+", "w+", "a+", "rt", "wt", "at")


def unnamed(source: str) -> Iterator[int]:
    """Yield the line of each call that opens text, of a file or of a program, and names no encoding."""
    for call in ast.walk(ast.parse(source)):
        if not isinstance(call, ast.Call):
            continue
        named = {keyword.arg for keyword in call.keywords}
        if "encoding" in named:
            continue
        name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        name = call.func.id if isinstance(call.func, ast.Name) else name
        texts = [word.value for word in call.args if isinstance(word, ast.Constant)]
        if name in ("read_text", "write_text") or (name in ("run", "Popen") and "text" in named):
            yield call.lineno
        elif name == "open" and isinstance(call.func, ast.Name) and texts == []:
            yield call.lineno
        elif name in OPENERS and any(text in OF_TEXT for text in texts):
            yield call.lineno


def test_every_text_file_of_the_package_is_opened_with_its_encoding():
    files = [ROOT / "train_async.py", *sorted((ROOT / "r3train").rglob("*.py"))]
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in files
        for line in unnamed(path.read_text(encoding="utf-8"))
    ]
    assert not found


@pytest.mark.parametrize(
    "call",
    ["p.read_text()", "p.write_text(t)", "open(p)", "p.open('a')", "run(c, text=True)"],
)
def test_a_call_without_an_encoding_is_found(call):
    assert list(unnamed(f"\n{call}")) == [2]
    assert not list(unnamed(f"{call[:-1]}, encoding='utf-8')".replace("(, ", "(")))


def test_a_server_starts_in_a_locale_that_is_not_utf_8(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3MoeForCausalLM"]}')
    code = "import sys; from pathlib import Path; from r3train.engine.server import other_models\n"
    code += "print(other_models(Path(sys.argv[1])))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env={"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        capture_output=True,
        encoding="utf-8",
    )
    assert "bailing_moe" in done.stdout, done.stderr


def test_what_a_server_imports_reads_its_files_in_a_locale_that_is_not_utf_8(tmp_path, monkeypatch):
    """Sources of torch, say."""
    for name, value in {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "source").write_text("\u2014", encoding="utf-8")
    environment = SGLangServer(tmp_path, tmp_path / "log", device="cpu").environment()
    code = f"assert len(open({str(tmp_path / 'source')!r}).read()) == 1"
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
