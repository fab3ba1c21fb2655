"""Asynchronous RL of a mixture-of-experts model with rollout routing replay, in a rank of torchrun.

    torchrun --master-port 29500 --nproc-per-node 2 train_async.py --config configs/tiny_cpu.toml \
        --use-rollout-routing-replay --enable-r3-correctness-check

For torchrun and Slurm; on one machine ``r3train train`` starts the same ranks.  The program is
r3train/launch/start/train.py.
"""

from __future__ import annotations

try:
    from r3train.launch.start.train import as_rank, main
except ModuleNotFoundError as error:
    if error.name != "click":
        raise
    raise SystemExit(
        "Error: this python lacks r3train's packages: take .venv/bin/python, made by `make venv`"
    )

if __name__ == "__main__":  # writers of torch_dist checkpoints import this file again
    as_rank(main)
