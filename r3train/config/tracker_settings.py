"""Trackers of experiments next to the run's own files."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from r3train.config.requirements import only_with
from r3train.config.section import Section


class TrackersSection(Section):
    """Trackers of experiments next to the run's own files; [run] tensorboard is one more."""

    title: ClassVar[str] = "Trackers"

    use_wandb: bool = False
    """Send metrics, samples and the configuration to Weights & Biases."""
    wandb_project: Annotated[str, only_with("use_wandb")] = Field(default="r3train", min_length=1)
    """W&B project."""
    wandb_group: Annotated[str | None, only_with("use_wandb")] = Field(default=None, min_length=1)
    """W&B group of the run."""
    wandb_team: Annotated[str | None, only_with("use_wandb")] = Field(default=None, min_length=1)
    """W&B team or user; unset means the key's own."""
    wandb_mode: Annotated[
        Literal["online", "offline", "disabled"] | None, only_with("use_wandb")
    ] = None
    """online, offline (files in the run directory, for wandb sync) or disabled; unset leaves it to W&B's
    own settings."""
    use_mlflow: bool = False
    """Send metrics, samples and the configuration to MLflow."""
    mlflow_tracking_uri: Annotated[str | None, only_with("use_mlflow")] = Field(
        default=None, min_length=1
    )
    """MLflow server or store; unset leaves it to MLflow's own settings (MLFLOW_TRACKING_URI)."""
    mlflow_experiment_name: Annotated[str, only_with("use_mlflow")] = Field(
        default="r3train", min_length=1
    )
    """MLflow experiment."""
    tracker_tags: Annotated[tuple[str, ...], only_with("use_wandb or use_mlflow")] = Field(
        default=(), strict=False
    )
    """Tags of the run in W&B and MLflow.  Its name there is run_name."""
    tracker_notes: Annotated[str | None, only_with("use_wandb or use_mlflow")] = Field(
        default=None, min_length=1
    )
    """Notes of the run in W&B, its description in MLflow."""
    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Port of the loopback interface at which rank 0 serves the last step's metrics as Prometheus text, at
    /metrics; 0 takes a free one and says which.  Unset: none."""
