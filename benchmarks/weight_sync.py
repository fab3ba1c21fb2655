"""A weight sync against the time to copy the same bytes: actor -> SGLang, both transports.

    python -m benchmarks.weight_sync [--rounds 7]

One actor of one rank, one real server.  Every round copies the bytes in memory, gathers the weights
under their Hugging Face names without sending them, and publishes them by broadcast, by disk, and by
broadcast with the comparison of --check-weight-update-equal.

The same for a second actor with LoRA: all weights with the adapters merged, the adapted ones alone, and
the adapters themselves, to a second server that serves them.
"""

from __future__ import annotations

from functools import partial
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
from benchmarks.tiny_jobs import DTYPE, tiny_model
from r3train.families.read_facts import read_hf_facts
from r3train.config.lora_settings import LoraSection
from r3train.engine.adapters import AdapterPublisher, Adapters, adapter_flags
from r3train.engine.control import EngineControl
from r3train.engine.publish import BroadcastGroup, DistributedPublisher, Published, flatten
from r3train.engine.publish_disk import DiskPublisher, compare_on_servers
from r3train.engine.publish_memory import SharedMemoryPublisher
from r3train.engine.server import SGLangServer
from r3train.trainer.megatron.actor import MegatronActor

LORA = LoraSection(lora_rank=8)
BUCKET_BYTES = 512 * 1024 * 1024  # the default of --update-weight-buffer-size
# the actor has the first GPU, which no second process of one NCCL group can have; the servers share the next
ON_GPUS = {
    "dtype": DTYPE,
    "server_args": (
        {"base_gpu_id": 1, "mem_fraction_static": 0.3} if torch.cuda.is_available() else {}
    ),
}


def main() -> None:
    arguments = flags(__doc__, rounds=7)
    with (
        tiny_model(MODEL) as tiny,
        SGLangServer(tiny / "model", tiny / "sglang.log", **ON_GPUS) as server,
    ):
        with one_rank() as place:
            actor = make_actor(tiny / "model", place)
            result = measure(actor, server.addr, tiny, arguments.rounds)
            actor = make_actor(tiny / "model", place, lora=LORA)
            result["lora"] = measure_lora(actor, server.addr, tiny, arguments.rounds)
    write_result(arguments.output, result)


def by_broadcast(control: EngineControl) -> DistributedPublisher:
    """A publisher by process group, of the backend that the device has."""
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    return DistributedPublisher(
        control, bucket_bytes=BUCKET_BYTES, group=BroadcastGroup(backend, DEVICE)
    )


def measure(actor: MegatronActor, addr: str, tiny: Path, rounds: int) -> dict[str, Any]:
    """Seconds of every arm round by round, and the ratios to the copy of the same round."""
    with EngineControl([addr]) as control:
        network = by_broadcast(control)
        disk = DiskPublisher(
            control,
            directory=tiny / "weights",
            hf_checkpoint=tiny / "model",
            bucket_bytes=BUCKET_BYTES,
        )
        memory = SharedMemoryPublisher(
            control,
            directory=tiny / "weights_in_memory",
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
            found = compare_on_servers(control, reference, actor.hf_weights(), version=version)
            found.require_equal(version)
            assert not actor.parameters_unlike(reference.newest)

        # the tensors themselves: a view of them would be what is copied
        weights = [(name, t.clone()) for name, t in actor.hf_weights()]
        size = sum(tensor.nbytes for _, tensor in weights)
        flat = flatten(weights, torch.empty(size, dtype=torch.uint8))
        target = torch.empty_like(flat)
        versions = count(1)
        ways = {"broadcast": network, "disk": disk, "memory": memory}

        def publish_by(way: str) -> None:
            ways[way].publish(actor.hf_weights(), version=next(versions))

        arms = {
            "copy": lambda: target.copy_(flat),
            "gather": lambda: [t for _, t in actor.hf_weights()],
            **{way: partial(publish_by, way) for way in ways},
            **{f"{way}_again": partial(publish_by, way) for way in ways},  # the noise
            "checked": checked,
        }
        seconds = in_turns(arms, rounds)  # the first round makes the process group
        network.close()
        disk.close()
        memory.close()
    return {
        "gigabytes": round(flat.nbytes / 1e9, 3),
        "tensors": len(weights),
        "seconds": spreads(seconds),
        "over_copy": {name: ratios(values, seconds["copy"]) for name, values in seconds.items()},
    }


def measure_lora(actor: MegatronActor, addr: str, tiny: Path, rounds: int) -> dict[str, Any]:
    """Bytes, tensors and seconds of an update of adapters, by what is sent."""
    hf, versions = read_hf_facts(tiny / "model"), count(1)
    flags = adapter_flags(LORA, hf, max_weight_staleness=1)
    server = SGLangServer(tiny / "model", tiny / "sglang_lora.log", adapter_flags=flags, **ON_GPUS)
    with (
        server,
        EngineControl([addr]) as control,
        EngineControl([server.addr], adapters_alone=True) as adapter_control,
    ):
        merged = by_broadcast(control)
        adapters = AdapterPublisher(
            adapter_control,
            Adapters(),
            directory=tiny / "adapters",
            settings=LORA,
            hf=hf,
            max_weight_staleness=1,
        )
        sent: dict[str, Published] = {}

        def publish(arm: str) -> None:
            version = next(versions)
            if arm == "adapter":
                sent[arm] = adapters.publish(actor.adapter_weights(), version=version)
            else:
                weights = actor.hf_weights(targets_alone=arm == "targets")
                sent[arm] = merged.publish(weights, version=version)

        arms = {arm: partial(publish, arm) for arm in ("merged", "targets", "adapter")}
        seconds = in_turns(arms, rounds)
        merged.close()
    return {
        "rank": LORA.lora_rank,
        "megabytes": {arm: round(p.num_bytes / 1e6, 1) for arm, p in sent.items()},
        "tensors": {arm: p.num_tensors for arm, p in sent.items()},
        "seconds": spreads(seconds),
    }


if __name__ == "__main__":
    main()
