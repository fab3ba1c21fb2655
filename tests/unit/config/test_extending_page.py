"""The model family of docs/guide/extending.md is the one in the code, and a family is in one file."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from r3train.families.read_facts import read_hf_facts
from r3train.families import FAMILIES
from r3train.families.checks.family_checks import family_conflicts
from r3train.verify.tiny import build
from r3train.families.tiny_options import TinyOptions

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/guide/extending.md").read_text()
BLOCKS = re.findall(r"```python\n# (r3train/\S+\.py)\n(.*?)```", PAGE, flags=re.S)


def test_the_pages_code_is_the_codes():
    assert len(BLOCKS) == 1
    for file, code in BLOCKS:
        assert code in (ROOT / file).read_text(), f"{file}:\n{code}"


def test_a_family_is_in_the_file_that_the_page_shows():
    named = {file for file, _ in BLOCKS}
    found = subprocess.run(
        ["grep", "-rliw", "--include=*.py", "-e", "olmoe", "r3train"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    # text and sizes of a layer that it shares with MiniMax-M2
    shared = ("trainer/megatron/layers/whole_width_norm.py",)
    assert set(found) - named <= {f"r3train/{file}" for file in shared}


def test_without_its_file_the_family_is_refused_with_the_way_to_this_page(tmp_path, monkeypatch):
    build(tmp_path / "tiny", TinyOptions(family="olmoe", num_layers=1))
    hf = read_hf_facts(tmp_path / "tiny/model")
    assert list(family_conflicts(hf)) == []
    monkeypatch.delitem(FAMILIES, "olmoe")
    (complaint,) = family_conflicts(hf)
    assert "'olmoe' was not verified" in complaint and "r3train docs extending" in complaint
