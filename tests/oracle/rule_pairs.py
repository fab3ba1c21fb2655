"""Learning rules in which every two parts meet: estimator, loss, mean, correction, KL and topology."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

Part = Mapping[str, Any]

_PPO_BOUNDS: Part = {"eps_clip": 0.02, "eps_clip_high": 0.12}
_NO_CLIP: Part = {"eps_clip": 0.2, "eps_clip_high": 0.2}
_WEIGHTS: Part = {"tis_clip_low": 0.6, "tis_clip": 1.3}
TWO_REWARDS: Part = {"reward_keys": ("right", "short"), "reward_weights": ("1.0", "0.4")}

# the settings of each part; those that a part does not name are ``NEUTRAL``
NEUTRAL: Part = {
    "grpo_std_normalization": True,
    "gamma": 1.0,
    "normalize_advantages": False,
    "use_tis": False,
    "rollout_is": "none",
    "rollout_is_mode": "truncate",
    "tis_clip": 2.0,
    "tis_clip_low": 0.0,
    "ratio_anchor": "old",
    "eps_clip_c": None,
    "rollout_rs": (),
    "rollout_rs_threshold": (),
    "opsm_delta": None,
    "kl_loss_coef": 0.3,
    "kl_loss_type": "k3",
    "use_unbiased_kl": False,
}
ADVANTAGES: dict[str, Part] = {
    "grpo": {},
    "rloo": {},
    "reinforce_plus_plus": {"gamma": 0.9},
    "reinforce_plus_plus_baseline": {},
    "max_rl": {},
    "gdpo": TWO_REWARDS,
}
LOSSES: dict[str, Part] = {
    "ppo": {"policy_loss": "ppo", **_PPO_BOUNDS},
    "dual_clip": {"policy_loss": "ppo", **_PPO_BOUNDS, "eps_clip_c": 1.04},
    "gspo": {"policy_loss": "gspo", "eps_clip": 0.003, "eps_clip_high": 0.005},
    "cispo": {"policy_loss": "cispo", **_PPO_BOUNDS},
    "dppo_tv": {"policy_loss": "dppo_tv", "dppo_delta": 0.002, **_NO_CLIP},
    "dppo_kl": {"policy_loss": "dppo_kl", "dppo_delta": 0.001, **_NO_CLIP},
}
MEANS: dict[str, Part] = {
    name: {"loss_aggregation": name}
    for name in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant")
}


def _of(level: str, mode: str, **masks: str) -> Part:
    bounds = {"tis_clip_low": 0.2, "tis_clip": 4.0} if level == "sequence" else _WEIGHTS
    return {"rollout_is": level, "rollout_is_mode": mode, **bounds, **_masks(**masks)}


def _masks(**masks: str) -> Part:
    return {"rollout_rs": tuple(masks), "rollout_rs_threshold": tuple(masks.values())}


# every name of --rollout-rs is in one of them
CORRECTIONS: dict[str, Part] = {
    "opsm": {"opsm_delta": 0.002},
    "masks": _masks(seq_max_k2="0.5", token_k3="0.3", seq_mean_k3="0.12"),
    "anchor": {"ratio_anchor": "rollout", **_masks(seq_mean_k1="0.8_1.3", seq_sum_k3="2.5")},
    "token_truncate": _of("token", "truncate", token_k1="0.6_1.9"),
    "token_mask": _of("token", "mask", seq_sum_k1="0.2_3.1"),
    "sequence_truncate": _of("sequence", "truncate", seq_sum_k2="1.4"),
    "sequence_mask": _of("sequence", "mask", token_k2="0.4"),
    "geometric_truncate": _of("geometric", "truncate", seq_mean_k2="0.09"),
    "geometric_mask": _of("geometric", "mask", seq_max_k3="0.6"),
}
KLS: dict[str, Part] = {
    "k1": {"kl_loss_type": "k1"},
    "k2_unbiased": {"kl_loss_type": "k2", "use_unbiased_kl": True},
    "k3": {},
    "k3_unbiased": {"use_unbiased_kl": True},
    "k3+_native": {"kl_loss_type": "k3+", "ref_routing": "native"},
    "in_the_reward": {"kl_loss_coef": 0.0, "kl_coef": 0.05},
}
TOPOLOGIES: dict[str, tuple[str, ...]] = {
    "tp2": ("--tensor-model-parallel-size", "2", "--sequence-parallel"),
    "dp2": (),
    "cp2": ("--context-parallel-size", "2"),
    "pp2": ("--pipeline-model-parallel-size", "2"),
}
PARTS: tuple[Mapping[str, Any], ...] = (
    ADVANTAGES,
    LOSSES,
    MEANS,
    CORRECTIONS,
    KLS,
    TOPOLOGIES,
)


def refused(one: str, other: str) -> bool:
    """True for two parts that a start-up refuses together."""
    # dppo is against the engine as it is; gdpo reads no reward that could pay for a KL
    weighed = {name for name, part in CORRECTIONS.items() if "rollout_is" in part} | {"anchor"}
    both = {one, other}
    against_engine = any(name.startswith("dppo") for name in both)
    return (against_engine and bool(both & weighed)) or both == {"gdpo", "in_the_reward"}


def rows() -> list[tuple[str, ...]]:
    """Rows of one name from each of ``PARTS``: every two names that may meet do, in some row."""
    left = {
        pair
        for (i, one), (j, other) in combinations(enumerate(PARTS), 2)
        for pair in ((i, a, j, b) for a in one for b in other)
        if not refused(pair[1], pair[3])
    }
    out, taken = [], Counter()
    while left:
        i, a, j, b = min(left)
        row = {i: a, j: b}
        for k in sorted(range(len(PARTS)), key=lambda k: -len(PARTS[k])):
            if k in row:
                continue
            fits = [n for n in PARTS[k] if not any(refused(n, other) for other in row.values())]
            # of equals the one that is in the fewest rows
            row[k] = max(fits, key=lambda n: (len(left & _pairs({**row, k: n})), -taken[n]))
        taken.update(row.values())
        left -= _pairs(row)
        out.append(tuple(row[k] for k in range(len(PARTS))))
    return out


def _pairs(row: Mapping[int, str]) -> set[tuple[int, str, int, str]]:
    return {(i, a, j, b) for (i, a), (j, b) in combinations(sorted(row.items()), 2)}


def settings(row: Sequence[str]) -> dict[str, Any]:
    """The settings of a row of ``rows``, by the names of their flags."""
    advantage, loss, mean, correction, kl, _ = row
    parts = ADVANTAGES[advantage], LOSSES[loss], MEANS[mean], CORRECTIONS[correction], KLS[kl]
    out = dict(NEUTRAL) | {"advantage_estimator": advantage}
    for part in parts:
        out |= part
    return out
