"""Directories that an export may be written to, and those that it replaces."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from r3train.hf_checkpoint import MARKER, check_export_directory, export_checkpoint


@pytest.fixture
def base(tmp_path):
    directory = tmp_path / "base"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_text("weights of the base")
    return directory


def export(directory, base, value=1.0):
    return export_checkpoint([("w", torch.full((2,), value))], directory, hf_checkpoint=base)


def test_an_export_replaces_an_earlier_one_and_leaves_nothing_beside_it(tmp_path, base):
    directory = tmp_path / "hf"
    export(directory, base)
    first = (directory / "model-00001-of-00001.safetensors").read_bytes()
    assert export(directory, base, 2.0) == (1, 8)
    assert (directory / "model-00001-of-00001.safetensors").read_bytes() != first
    assert {p.name for p in tmp_path.iterdir()} == {"base", "hf"}
    assert {p.name for p in directory.iterdir()} == {
        "config.json",
        "model-00001-of-00001.safetensors",
        "model.safetensors.index.json",
        MARKER,
    }


def test_what_is_no_export_is_never_replaced(tmp_path, base):
    directory = tmp_path / "hf"
    directory.mkdir()
    export(directory, base)  # empty: fine
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years")
    for call in (check_export_directory, lambda d, b: export(d, b)):
        with pytest.raises(
            ValueError, match=f"holds something that is no earlier export .*{MARKER}"
        ):
            call(mine, base)
    assert (mine / "thesis.txt").read_text() == "years"


def test_the_base_checkpoint_is_never_replaced(tmp_path, base):
    (base / MARKER).write_text("{}")  # not even one that was exported itself
    with pytest.raises(ValueError, match="would replace --hf-checkpoint"):
        check_export_directory(tmp_path / "x" / ".." / "base", base)


def test_a_file_in_its_place_is_refused(tmp_path, base):
    with pytest.raises(ValueError, match="got a file, expected a directory"):
        check_export_directory(base / "config.json", base)


def test_a_failed_export_leaves_the_earlier_one(tmp_path, base):
    directory = tmp_path / "hf"
    export(directory, base)
    before = (directory / "model-00001-of-00001.safetensors").read_bytes()

    def cut():
        yield "w", torch.ones(2)
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        export_checkpoint(cut(), directory, hf_checkpoint=base)
    assert (directory / "model-00001-of-00001.safetensors").read_bytes() == before
    assert {p.name for p in tmp_path.iterdir()} == {"base", "hf"}


@pytest.mark.parametrize(
    "model_type, vision",
    [
        ("qwen3_5_moe", "model.visual.blocks.0.attn.proj.weight"),
        ("kimi_k25", "vision_tower.encoder.blocks.0.wo.weight"),
        ("kimi_k25", "mm_projector.proj.0.weight"),
    ],
)
def test_an_export_brings_the_vision_tower_along_bit_for_bit(model_type, vision, tmp_path):
    base, names = tmp_path / "base", (vision, "lm_head.weight")
    base.mkdir()
    (base / "config.json").write_text(f'{{"model_type": "{model_type}", "text_config": {{}}}}')
    held = {name: torch.randn(3, 2).bfloat16() for name in names}
    save_file(held | {"mtp.norm.weight": torch.ones(2)}, base / "model.safetensors")
    trained = torch.zeros(3, 2)
    exported = export_checkpoint([(names[1], trained)], tmp_path / "hf", hf_checkpoint=base)
    assert exported == (2, 12 + 24)
    found = load_file(tmp_path / "hf" / "model-00001-of-00001.safetensors")
    assert found.keys() == set(names) and torch.equal(found[names[1]], trained)
    assert torch.equal(found[names[0]], held[names[0]])
