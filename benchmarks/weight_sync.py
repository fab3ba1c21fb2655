"""A weight sync against the time to copy the same bytes: actor -> SGLang, both transports.

    python -m benchmarks.weight_sync [--rounds 7]

One actor of one rank, one real server.  Every round copies the bytes in memory, gathers the weights
under their Hugging Face names without sending them, and publishes them by broadcast, by disk, and by
broadcast with the comparison of --check-weight-update-equal.
"""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.replay_overhead import (  # first: it prepares the device
    DEVICE,
    MODEL,
    make_actor,
    one_rank,
)

import torch

from benchmarks.measure import flags, in_turns, ratios, spreads, write_result
from benchmarks.tiny_jobs import tiny_model
from r3train.engine.control import EngineControl
from r3train.engine.publish import DistributedPublisher, flatten
from r3train.engine.publish_disk import DiskPublisher, require_equal_on_servers
from r3train.engine.server import SGLangServer
from r3train.trainer.megatron.actor import MegatronActor

BUCKET_BYTES = 512 * 1024 * 1024  # the default of --update-weight-buffer-size


def main() -> None:
    arguments = flags(__doc__, rounds=7)
    with tiny_model(MODEL) as tiny, SGLangServer(tiny / "model", tiny / "sglang.log") as server:
        with one_rank() as place:
            actor = make_actor(tiny / "model", place)
            result = measure(actor, server.addr, tiny, arguments.rounds)
    write_result(arguments.output, result)


def measure(actor: MegatronActor, addr: str, tiny: Path, rounds: int) -> dict[str, Any]:
    """Seconds of every arm round by round, and the ratios to the copy of the same round."""
    with EngineControl([addr]) as control:
        network = DistributedPublisher(
            control,
            bucket_bytes=BUCKET_BYTES,
            backend="nccl" if torch.cuda.is_available() else "gloo",
            device=DEVICE,
        )
        disk = DiskPublisher(
            control,
            directory=tiny / "weights",
            hf_checkpoint=tiny / "model",
            bucket_bytes=BUCKET_BYTES,
        )
        reference = DiskPublisher(
            control,
            directory=tiny / "weight_check",
            hf_checkpoint=tiny / "model",
            bucket_bytes=BUCKET_BYTES,
            flush_cache=False,
        )

        def checked() -> None:
            version = next(versions)
            network.publish(actor.hf_weights(), version=version)
            require_equal_on_servers(control, reference, actor.hf_weights(), version=version)
            assert not actor.parameters_unlike(reference.newest)

        # the tensors themselves: a view of them would be what is copied
        weights = [(name, t.clone()) for name, t in actor.hf_weights()]
        flat = flatten(weights, "cpu")
        target = torch.empty_like(flat)
        versions = count(1)
        arms = {
            "copy": lambda: target.copy_(flat),
            "gather": lambda: [t for _, t in actor.hf_weights()],
            "broadcast": lambda: network.publish(actor.hf_weights(), version=next(versions)),
            "disk": lambda: disk.publish(actor.hf_weights(), version=next(versions)),
            "checked": checked,
        }
        seconds = in_turns(arms, rounds)  # the first round makes the process group
        network.close()
        disk.close()
    return {
        "gigabytes": round(flat.nbytes / 1e9, 3),
        "tensors": len(weights),
        "seconds": spreads(seconds),
        "over_copy": {name: ratios(values, seconds["copy"]) for name, values in seconds.items()},
    }


if __name__ == "__main__":
    main()
