"""A list of what r3train changes in its dependencies: ``python -m r3train.doctor.patch_list ranks|servers``.

Each of the two is a process of its own, which makes the changes: neither Megatron nor SGLang is imported where the
doctor runs, and what is changed for the one is no original for the other.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

from r3train.launch.job.finding import Findings, ok, problem
from r3train.patches import noted, without_refusals
from r3train.cpu.torchvision_stub import declare_ops_for_imports
from r3train.engine import launch_server
from r3train.generation.environment_loop import let_collected_transports_end

_REMEDY = "install the versions of requirements/constraints.txt"


class PatchList:
    """The two processes, which begin at once and are read at the end."""

    def __init__(self) -> None:
        # a stopped doctor leaves none behind: they end by themselves, within seconds
        self._processes = {
            who: subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", __spec__.name, who],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                encoding="utf-8",
            )
            for who in _MAKERS
        }

    def findings(self) -> Findings:
        """Yield a line for each change that does not fit, and the number of those that do."""
        num_applied = 0
        for who, process in self._processes.items():
            out, errors = process.communicate()
            if process.returncode:
                last = (errors.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
                yield problem("patches", f"those of {who} cannot be made: {last}", _REMEDY)
                continue
            for place, why, wrong in json.loads(out):
                if wrong:
                    yield problem("patch", f"{place}: {wrong} ({why})", _REMEDY)
                else:
                    num_applied += 1
        yield ok("patches", f"{num_applied} apply")


def patch_rank() -> None:
    """Make every change of a rank on this device, of one router where a router is changed.

    Those of Transformer Engine's Adam are made on an optimizer, at the start of a job.
    """
    # each kind of process imports its own, and megatron-core after prepare_device()
    from r3train.cpu.device import prepare_device

    device = prepare_device()
    import torch
    from megatron.core.transformer.moe.router import TopKRouter

    # as above
    from r3train.trainer.megatron import auxiliary_losses, checkpoint, optimizer, replay, rotary
    from r3train.trainer.megatron.layers import (
        gated_delta_net,
        latent_attention,
        mamba,
        sparse_attention,
    )

    let_collected_transports_end()
    rotary.install()
    router = TopKRouter.__new__(TopKRouter)
    torch.nn.Module.__init__(router)
    router.config = SimpleNamespace(moe_z_loss_coeff=1.0)
    router.is_aux_loss_enabled = lambda: True
    router.layer_number, router.enable_expert_bias = 1, True
    chunk = torch.nn.Sequential(router)
    auxiliary_losses.AuxiliaryLosses([chunk], None, device, without_padding=False)
    replay.RoutingReplayManager(
        num_experts=1,
        topk=1,
        device=device,
        rank=0,
        counts_tokens=False,
        checks=False,
    ).install([chunk])
    checkpoint.Checkpointer(None, SimpleNamespace(save=Path()))
    if device.type == "cuda":
        optimizer.clip_by_kernels()
    else:
        for adapt in (
            gated_delta_net.adapt_gated_delta_net,
            latent_attention.adapt_latent_attention,
            mamba.adapt_mamba,
            sparse_attention.adapt_sparse_attention,
        ):
            adapt(SimpleNamespace(layer_specs=[]), None, 0, False)


def patch_server() -> None:
    """Make every change of an SGLang server on this device."""
    import torch

    # as in ``patch_rank``, in the order of a server
    from r3train.cpu import platform

    launch_server.hide_in_logs("the key")
    declare_ops_for_imports()
    if not torch.cuda.is_available():
        platform.in_our_server = True
        launch_server.do_without_cuda()
    from r3train.engine import compact_routes  # it imports SGLang

    compact_routes.install()
    compact_routes.shorten()
    if torch.cuda.is_available():
        return
    import sglang.srt.model_executor.model_runner  # noqa: F401 - it makes the platform, amid its imports

    from r3train.cpu import batched_attention, platform_class, sglang_lora  # noqa: F401

    platform_class.serve_families()
    sglang_lora.serve_adapters()


_MAKERS: dict[str, Callable[[], None]] = {"ranks": patch_rank, "servers": patch_server}


def main() -> None:
    """Print the changes of one kind of process as JSON: place, why, and what does not fit."""
    with without_refusals():
        _MAKERS[sys.argv[1]]()
    rows = [
        (p.place, p.why, "" if p.fits else f"it is {p.found}, expected {p.expects}")
        for p in noted()
    ]
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
