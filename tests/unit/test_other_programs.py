"""Programs of others in this environment see nothing of ours; our own processes import transformers."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from importlib.machinery import ModuleSpec
from importlib.metadata import distribution
from pathlib import Path

import pytest
from tests.unit.rewards.test_scoring import sample, scored, settings

from r3train import torchrun_start
from r3train.cpu import platform as cpu_platform
from r3train.engine.server import free_port

ROOT = Path(__file__).resolve().parents[2]
# as where an editable clone has been moved: the entry points stay, and what they name is gone
GONE = """
import sys
class Gone:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "r3train":
            raise ModuleNotFoundError(f"No module named {name!r}")
sys.meta_path.insert(0, Gone())
"""


def python(code: str, *arguments: object, **variables: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *map(str, arguments)],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_an_import_of_torch_loads_nothing_of_ours():
    assert not [e for e in distribution("r3train").entry_points if e.group == "torch.backends"]
    code = """
import sys, torch
print([name for name in sys.modules if name.partition(".")[0] == "r3train"])
print(hasattr(torch.ops.torchvision, "nms"))
"""
    done = python(code)
    assert done.stdout.split() == ["[]", "False"], done


def test_torch_and_torchrun_work_for_others_when_the_clone_is_gone(tmp_path):
    program = tmp_path / "train_async.py"
    program.write_text("print('trained')")
    code = GONE + "import torch, torch.distributed.run as run\nrun.main(sys.argv[1:])"
    done = python(code, "--master-port", free_port("127.0.0.1"), program)
    assert done.returncode == 0 and done.stdout == "trained\n", done


@pytest.mark.parametrize("name", ["train_async.py", "other.py"])
def test_the_torchrun_of_another_project_shows_its_traceback(name, tmp_path):
    (tmp_path / name).write_text("import sys; sys.exit(2)")
    code = "import sys, torch.distributed.run as run\nrun.main(sys.argv[1:])"
    done = python(code, "--master-port", free_port("127.0.0.1"), tmp_path / name)
    assert done.returncode == 1 and "ChildFailedError" in done.stderr, done


def test_the_torchrun_of_our_program_adds_nothing_to_what_its_rank_has_said(tmp_path):
    code = "import sys, torch.distributed.run as run\nrun.main(sys.argv[1:])"
    program = [ROOT / "train_async.py", "--config", tmp_path / "none.toml"]
    done = python(code, "--master-port", free_port("127.0.0.1"), *program, TMPDIR=str(tmp_path))
    assert (
        done.returncode == 1 and str(tmp_path / "none.toml") in done.stderr.splitlines()[-1]
    ), done


def test_our_program_is_known_by_whatever_path(tmp_path, monkeypatch):
    link = tmp_path / "link"
    link.symlink_to(ROOT)
    monkeypatch.chdir(ROOT)
    for word in ("train_async.py", str(ROOT / "train_async.py"), str(link / "train_async.py")):
        assert torchrun_start.is_ours(word)
    (tmp_path / "train_async.py").write_text("")
    for word in (str(tmp_path / "train_async.py"), "cli.py", "", "\0", "no/train_async.py"):
        assert not torchrun_start.is_ours(word)


def fake_torchvision(tmp_path, extension: bytes | None) -> dict[str, str]:
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('it is not imported')")
    if extension is not None:
        (package / "_C.so").write_bytes(extension)
    return {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}


@pytest.mark.parametrize(
    "extension, declared", [("loads", False), ("of another build", True), (None, True)]
)
def test_ops_are_declared_only_where_torchvisions_own_extension_does_not_load(
    extension, declared, tmp_path
):
    import _ctypes  # any shared library that loads

    content = {"loads": Path(_ctypes.__file__).read_bytes(), None: None}.get(extension, b"no ELF")
    code = """
import sys, torch
from r3train.cpu.torchvision_stub import declare_torchvision_ops
for _ in range(2):
    declare_torchvision_ops()
print(hasattr(torch.ops.torchvision, "nms"), "torchvision" in sys.modules)
"""
    done = python(code, **fake_torchvision(tmp_path, content))
    if "+cpu" not in subprocess.list2cmdline([__import__("torch").__version__]):
        pytest.skip("not run: this torch has CUDA")
    assert done.stdout.split() == [str(declared), "False"], done


def test_ops_are_declared_as_torchvision_is_looked_for_and_torch_not_before():
    code = """
import sys
from r3train.cpu.torchvision_stub import declare_ops_for_imports
declare_ops_for_imports(); declare_ops_for_imports()
import importlib.util
assert importlib.util.find_spec("torchvision") is not None  # as transformers asks
print("torch" in sys.modules, len([f for f in sys.meta_path if f.__class__.__module__.startswith("r3train")]))
from transformers import Qwen3MoeForCausalLM
print("torchvision" in sys.modules)
"""
    done = python(code)
    assert done.stdout.split() == ["False", "1", "True"], done


def imports_models(prompt, text, ids):
    """A reward of a user who knows nothing of torchvision."""
    from transformers import Qwen3MoeForCausalLM

    return float(Qwen3MoeForCausalLM.__name__ == "Qwen3MoeForCausalLM")


def test_a_reward_imports_models_of_transformers():
    data = settings(rm_type=f"{__name__}:imports_models", reward_timeout_s=300.0)
    assert scored(data, sample()) == [1.0]


DECLARED = {"declare_torchvision_ops", "declare_ops_for_imports", "prepare_device"}
# the standard library alone, and what runs nothing of anybody's
WITHOUT = {
    "agents/guard.py",
    "engine/server_guard.py",
    "rewards/code_launcher.py",
}


def programs() -> list[Path]:
    """Modules that are started as programs; train_async.py starts one of them."""
    texts = {path: path.read_text() for path in (ROOT / "r3train").rglob("*.py")}
    ends = 'if __name__ == "__main__":', "\nmain()\n"
    return sorted(path for path, text in texts.items() if any(end in text for end in ends))


def test_every_process_of_ours_declares_the_ops():
    assert len(programs()) >= 7
    for path in programs():
        tree = ast.parse(path.read_text())
        calls = {
            node.func.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        inside = str(path.relative_to(ROOT / "r3train"))
        assert bool(calls & DECLARED) != (inside in WITHOUT), path


def test_the_platform_stands_aside_in_servers_of_others_that_can_do_without(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    kernels = {"sgl_kernel": ModuleSpec("sgl_kernel", None)}
    monkeypatch.setattr(cpu_platform, "find_spec", kernels.get)
    monkeypatch.setattr(cpu_platform, "in_our_server", False)
    assert cpu_platform.activate() is None
    monkeypatch.setattr(cpu_platform, "in_our_server", True)
    assert cpu_platform.activate() is not None
    monkeypatch.setattr(cpu_platform, "in_our_server", False)
    kernels.clear()
    assert cpu_platform.activate() is not None, "SGLang serves on no CPU without them"
