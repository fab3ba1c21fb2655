"""Configurations for the doctor to look at, and what it says of them."""

from __future__ import annotations

from pathlib import Path

from r3train.config import RunConfig
from r3train.doctor.command import diagnose
from r3train.doctor.finding import PROBLEM

ROOT = Path(__file__).resolve().parents[2]


def config_of(tiny: Path, **fields) -> RunConfig:
    """The demo's configuration of a tiny model, changed by ``fields``."""
    given = {
        "hf_checkpoint": str(tiny / "model"),
        "prompt_data": str(tiny / "prompts.jsonl"),
        "use_rollout_routing_replay": True,
        "run_dir": str(tiny / "run"),
        **fields,
    }
    return RunConfig.from_toml(ROOT / "configs/tiny_cpu.toml", given)


def problems(config: RunConfig | None, world_size: int = 2, ports: tuple[int, ...] = ()) -> str:
    """A line a problem; each must have a remedy."""
    found = [f for f in diagnose(config, world_size, ports) if f.level == PROBLEM]
    assert all(f.remedy for f in found)
    return "\n".join(f"{f.subject}: {f.text}" for f in found)
