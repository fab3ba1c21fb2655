"""Configurations for the doctor to look at, and its problems with them."""

from __future__ import annotations

from pathlib import Path

from r3train.config import RunConfig
from r3train.doctor.diagnosis import diagnose
from r3train.launch.job.finding import PROBLEM, WARNING, Finding

ROOT = Path(__file__).resolve().parents[2]


def config_of(tiny: Path, **fields) -> RunConfig:
    """The demo's configuration of a tiny model, changed by ``fields``."""
    given = {
        "hf_checkpoint": str(tiny / "model"),
        "prompt_data": str(tiny / "prompts.jsonl"),
        "use_rollout_routing_replay": True,
        "run_dir": str(tiny / "run"),
        "max_weight_staleness": 0,  # an older rollout is a warning
        **fields,
    }
    return RunConfig.from_toml(ROOT / "configs/tiny_cpu.toml", given)


def worries(config: RunConfig | None, world_size: int = 2, **arguments) -> list[Finding]:
    """The warnings and problems; each must have a remedy."""
    found = [f for f in diagnose(config, world_size, **arguments) if f.level in (WARNING, PROBLEM)]
    assert all(f.remedy for f in found)
    return found
