"""Policy losses by name, or by import path."""

from __future__ import annotations

from typing import TYPE_CHECKING

from r3train.config.algorithm_settings import AlgorithmSection
from r3train.user_code import (
    find_user_code,
    running_user_code,
    import_user_code,
    require_function,
)

if TYPE_CHECKING:
    from r3train.algo.policy_loss import PolicyLoss
    from r3train.algo.loss_rows import LossRows, RowLoss

# import paths: a dry run knows the names without torch
POLICY_LOSSES = {
    "cispo": "r3train.algo.losses.cispo:cispo",
    "dppo_kl": "r3train.algo.losses.dppo:dppo_kl",
    "dppo_tv": "r3train.algo.losses.dppo:dppo_tv",
    "gspo": "r3train.algo.losses.ppo:gspo",
    "ppo": "r3train.algo.losses.ppo:ppo",
}
FLAG = "--policy-loss"


def get_policy_loss(name: str) -> PolicyLoss:
    """Return the loss registered as ``name``, or the function that "module:function" names.

    Raises ValueError, naming the flag, for an unknown name, for a path that cannot be imported, and
    for anything but a plain function (rows, algorithm).
    """
    found = find_user_code(FLAG, name, POLICY_LOSSES)
    if isinstance(found, str):
        found = import_user_code(FLAG, found)
    return require_function(FLAG, name, found, "rows", "algorithm")


def is_users(algorithm: AlgorithmSection) -> bool:
    """True if the loss is code of the user, by an import path."""
    return algorithm.loss_type != "sft" and algorithm.policy_loss not in POLICY_LOSSES


def configured_loss(algorithm: AlgorithmSection) -> PolicyLoss:
    """The loss of a row: that of ``policy_loss``, or the cross-entropy with ``--loss-type sft``.

    Whatever a loss by import path raises names it.
    """
    if algorithm.loss_type == "sft":
        from r3train.algo.losses.sft import sft  # it imports torch

        return sft
    name = algorithm.policy_loss
    policy_loss = get_policy_loss(name)
    if not is_users(algorithm):
        return policy_loss

    def named(rows: LossRows, algorithm: AlgorithmSection) -> RowLoss:
        with running_user_code(f"{FLAG} {name}"):
            found = policy_loss(rows, algorithm)
            if found.loss.shape != rows.mask.shape:
                got, expected = list(found.loss.shape), list(rows.mask.shape)
                raise ValueError(f"returned a loss of shape {got} for {expected} rows")
            return found

    return named


def check_policy_loss(algorithm: AlgorithmSection) -> None:
    """Run the loss once on rows without values; raises ValueError, naming the flag.

    Refuses a loss that raises, that waits for the device, that returns anything but a ``RowLoss``
    with one value for each row and a gradient, or that reuses the name of another part's metric.
    A loss of ours is not run: tests do that, and torch takes seconds to import.
    """
    if not is_users(algorithm):
        return
    name = algorithm.policy_loss
    # they import torch
    from r3train.algo.loss_rows import RowLoss
    from r3train.algo.policy_loss import metric_names, rows_without_values

    policy_loss = get_policy_loss(name)
    rows = rows_without_values(algorithm)
    with running_user_code(f"{FLAG} {name}: on rows of a meta device"):
        found = policy_loss(rows, algorithm)
    if not isinstance(found, RowLoss):
        raise ValueError(f"{FLAG} {name}: returned {type(found).__name__}, expected a RowLoss")
    if found.loss.shape != rows.mask.shape or not found.loss.requires_grad:
        raise ValueError(
            f"{FLAG} {name}: returned a loss of shape {list(found.loss.shape)} for"
            f" {list(rows.mask.shape)} rows, requires_grad {found.loss.requires_grad}: expected"
            " one value for each row, with the gradient of log_probs"
        )
    metrics = found.sums | found.maxima
    for metric, value in metrics.items():
        if value.shape != () or value.requires_grad:
            raise ValueError(
                f"{FLAG} {name}: metric {metric} has shape {list(value.shape)} and requires_grad"
                f" {value.requires_grad}, expected a detached scalar"
            )
    metrics_twice = set().union(*metric_names(_without_metrics, algorithm)) & metrics.keys()
    if metrics_twice or found.sums.keys() & found.maxima.keys():
        again = sorted(metrics_twice or found.sums.keys() & found.maxima.keys())
        raise ValueError(f"{FLAG} {name}: metrics {', '.join(again)} exist already")


def _without_metrics(rows: LossRows, algorithm: AlgorithmSection) -> RowLoss:
    from r3train.algo.loss_rows import RowLoss  # it imports torch

    return RowLoss(rows.log_probs)
