"""Shared memory that all ranks write: what a server would read of it is what rank 0 would write alone.

Real actors on gloo ranks; in the place of the servers stands one that reads the checkpoint.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.oracle.actors import actor_of, configuration, in_ranks
from tests.oracle.test_families import make
from tests.oracle.test_lora import LORA, TP2, UNEVEN as PP2

pytestmark = pytest.mark.ranks

EP2 = dict(expert_model_parallel_size=2)
TP2_EP2 = TP2 | EP2 | dict(expert_tensor_parallel_size=1)
# ranks, family, settings, and how many ranks write
CASES: dict[str, tuple[int, str, dict[str, Any], int]] = {
    "EP2": (2, "qwen3_moe", EP2, 2),
    "EP2 LoRA": (2, "qwen3_moe", EP2 | LORA, 2),
    "EP2 bfloat16": (2, "glm4_moe", EP2 | dict(bf16=True), 2),
    "TP2 EP2": (2, "qwen3_moe", TP2_EP2, 2),
    "TP2 EP2 LoRA": (2, "qwen3_moe", TP2_EP2 | LORA, 2),
    "PP2": (2, "qwen3_moe", PP2, 2),
    "PP2 LoRA": (2, "qwen3_moe", PP2 | LORA, 2),
    "EP2 fused": (2, "gpt_oss", EP2, 1),  # its experts are one tensor on disk
    "DP2": (2, "qwen3_moe", {}, 1),
    "TP2 EP2 ETP2": (4, "qwen3_moe", TP2 | EP2 | dict(expert_tensor_parallel_size=2), 2),
    "PP2 EP2": (4, "qwen3_moe", PP2 | EP2, 4),
}


class Reader:
    """Servers that read every tensor of a checkpoint, by file."""

    def update_weights_from_disk(self, path: str, *, weight_version: int, flush_cache: bool):
        # copies, as a server's: the memory is mapped, and written again
        self.files = {
            file.name: {name: tensor.clone() for name, tensor in load_file(file).items()}
            for file in Path(path).glob("*.safetensors")
        }


def written(directory: str, family: str, parallel: dict[str, Any]) -> dict[str, Any]:
    """On rank 0 what was read of two versions, and what it exports alone; in a rank."""
    from r3train.engine.publish_memory import SharedMemoryPublisher
    from r3train.host_group import host_barrier
    from r3train.loop.distribute import gather_json

    checkpoint, found = Path(directory) / family, {}
    rank, servers = torch.distributed.get_rank(), Reader()
    how = dict(directory=Path(directory) / "memory", hf_checkpoint=checkpoint, bucket_bytes=4096)
    with actor_of(configuration(checkpoint, **parallel)) as actor:
        if rank == 0:
            publisher = SharedMemoryPublisher(servers, gather=gather_json, **how)
        host_barrier()  # a job's ranks are told the directory
        if rank:
            publisher = SharedMemoryPublisher(None, gather=gather_json, **how)
        for version in (1, 2):
            weights = actor.hf_weights(gather_to="owners")
            if rank:
                publisher.send(weights, version=version)
            else:
                published = publisher.publish(weights, version=version)
            alone = {name: t.clone() for name, t in actor.hf_weights()}
            if rank == 0:
                tensors = {n: t for file in servers.files.values() for n, t in file.items()}
                assert published.sent.keys() == tensors.keys() == alone.keys()
                assert published.num_bytes == sum(t.nbytes for t in tensors.values())
                assert sum(map(len, servers.files.values())) == len(tensors)
                unlike = [n for n, t in tensors.items() if not torch.equal(t, alone[n])]
                assert not unlike, (version, unlike)
                found[f"writers {version}"] = len({name.split("-")[1] for name in servers.files})
            with torch.no_grad():
                for chunk in actor.model.unwrapped:
                    for parameter in chunk.parameters():
                        parameter.mul_(1.5).add_(0.01)  # of an adapter too, which begins with zeros
        host_barrier()
        publisher.close()
        host_barrier()
        assert not list(how["directory"].glob("*.safetensors"))
    return found


@pytest.mark.parametrize("case", CASES)
def test_servers_read_from_all_ranks_what_rank_0_would_have_written_alone(case, tmp_path):
    world_size, family, parallel, writers = CASES[case]
    make(tmp_path / family, family)
    first, *_ = in_ranks(world_size, tmp_path / "ranks", written, str(tmp_path), family, parallel)
    assert first == {"writers 1": writers, "writers 2": writers}
