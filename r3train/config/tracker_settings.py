"""Trackers of experiments next to the run's own files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from r3train.config.section import Section


class TrackersSection(Section):
    """Trackers of experiments next to the run's own files; [run] tensorboard is one more."""

    title: ClassVar[str] = "Trackers"

    use_wandb: bool = False
    """Send metrics, samples and the configuration to Weights & Biases."""
    wandb_project: str = Field(default="r3train", min_length=1)
    """W&B project."""
    wandb_group: str | None = Field(default=None, min_length=1)
    """W&B group of the run."""
    wandb_team: str | None = Field(default=None, min_length=1)
    """W&B team or user; unset means the key's own."""
    wandb_mode: Literal["online", "offline", "disabled"] | None = None
    """online, offline (files in the run directory, for wandb sync) or disabled; unset leaves it to W&B's
    own settings."""
    use_mlflow: bool = False
    """Send metrics, samples and the configuration to MLflow."""
    mlflow_tracking_uri: str | None = Field(default=None, min_length=1)
    """MLflow server or store; unset leaves it to MLflow's own settings (MLFLOW_TRACKING_URI)."""
    mlflow_experiment_name: str = Field(default="r3train", min_length=1)
    """MLflow experiment."""

    def conflicts(self) -> Iterator[str]:
        """Yield a complaint for each setting of a tracker that is off."""
        for tracker in ("wandb", "mlflow"):
            if getattr(self, f"use_{tracker}"):
                continue
            for name in (name for name in self.changed() if name.startswith(tracker)):
                yield f"{name} is without effect: add --use-{tracker}"
