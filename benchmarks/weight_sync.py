"""A weight sync against the time to copy the same bytes: actor -> SGLang, both transports.

    python -m benchmarks.weight_sync [--rounds 7]

One actor of one rank, one real server.  Every round copies the bytes in memory, gathers the weights
under their Hugging Face names without sending them, and publishes them by broadcast and by disk.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from r3train.trainer.megatron.cpu_device import prepare_device

DEVICE = prepare_device()

import torch  # noqa: E402

from benchmarks.measure import ratios, spread, write_result  # noqa: E402
from benchmarks.replay_overhead import MODEL, make_actor  # noqa: E402
from r3train.config.parallel import ParallelSection  # noqa: E402
from r3train.engine.control import EngineControl  # noqa: E402
from r3train.engine.server import SGLangServer, free_port  # noqa: E402
from r3train.tiny import build  # noqa: E402
from r3train.trainer.megatron.actor import MegatronActor  # noqa: E402
from r3train.trainer.megatron.topology import (  # noqa: E402
    init_distributed,
    init_model_parallel,
    shutdown,
)
from r3train.engine.publish import DistributedPublisher, flatten  # noqa: E402
from r3train.engine.publish_disk import DiskPublisher  # noqa: E402

BUCKET_BYTES = 512 * 1024 * 1024  # the default of --update-weight-buffer-size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name, value in dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1").items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", str(free_port("127.0.0.1")))
    with tempfile.TemporaryDirectory() as scratch:
        build(Path(scratch) / "tiny", MODEL)
        checkpoint = Path(scratch) / "tiny" / "model"
        with SGLangServer(checkpoint, Path(scratch) / "sglang.log") as server:
            init_distributed("auto", 10)
            place = init_model_parallel(ParallelSection(), 1)
            actor = make_actor(checkpoint, place, replay=False, check=False)
            result = measure(actor, server.addr, checkpoint, Path(scratch), arguments.rounds)
    shutdown()
    write_result(arguments.output, result)


def measure(
    actor: MegatronActor, addr: str, checkpoint: Path, scratch: Path, rounds: int
) -> dict[str, Any]:
    """Seconds of every arm round by round, and the ratios to the copy of the same round."""
    version = 0
    with EngineControl([addr]) as control:
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        network = DistributedPublisher(
            control, bucket_bytes=BUCKET_BYTES, backend=backend, device=DEVICE
        )
        disk = DiskPublisher(
            control,
            directory=scratch / "weights",
            hf_checkpoint=checkpoint,
            bucket_bytes=BUCKET_BYTES,
        )
        # the tensors themselves: a view of them would be what is copied
        weights = [(name, t.clone()) for name, t in actor.hf_weights()]
        flat = flatten(weights, "cpu")
        target = torch.empty_like(flat)

        def publish(publisher: Any) -> None:
            nonlocal version
            version += 1
            publisher.publish(actor.hf_weights(), version=version)

        arms: dict[str, Callable[[], Any]] = {
            "copy": lambda: target.copy_(flat),
            "gather": lambda: [t for _, t in actor.hf_weights()],
            "broadcast": lambda: publish(network),
            "disk": lambda: publish(disk),
        }
        seconds: dict[str, list[float]] = {name: [] for name in arms}
        for number in range(rounds + 1):
            for name, work in arms.items():
                began = time.perf_counter()
                work()
                if number:  # the first round makes the group and warms up
                    seconds[name].append(time.perf_counter() - began)
        network.close()
        disk.close()
    return {
        "gigabytes": round(flat.nbytes / 1e9, 3),
        "tensors": len(weights),
        "seconds": {name: spread(values) for name, values in seconds.items()},
        "over_copy": {name: ratios(values, seconds["copy"]) for name, values in seconds.items()},
    }


if __name__ == "__main__":
    main()
