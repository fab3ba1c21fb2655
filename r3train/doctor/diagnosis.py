"""The checks of a start and the doctor's own, in one list."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from r3train.config import RunConfig
from r3train.families.read_facts import read_hf_facts
from r3train.doctor import kernels, machine, memory, job_facts, patch_list
from r3train.families.published import config_directory
from r3train.launch.gpus import gpus_here, ranks_that_fit
from r3train.launch.job.finding import Findings, PROBLEM
from r3train.launch.job.limits import check_shared_memory
from r3train.launch.job.preflight import By, Check, CHECKS, Found

_REMEDY = "fix the setting or the file that it names (r3train docs configuration)"


def diagnose(
    config: RunConfig | None,
    world_size: int,
    *,
    nproc_per_node: int | None = None,
    gpu: str | None = None,
) -> Findings:
    """Yield all findings, cheap ones first; without a configuration those of the machine only.

    world_size: ranks in all.  nproc_per_node: those of this node; None means as many as its GPUs
    take, and without GPUs all of them.  gpu: a name of ``kernels.CARDS``; None means the first that is here.
    """
    patches = patch_list.PatchList()
    num_gpus, gpu_bytes = gpus_here()
    num_ranks = nproc_per_node or ranks_that_fit(world_size, num_gpus)
    node = machine.Node(num_gpus, gpu_bytes, world_size, num_ranks)
    checks = list(_machine_checks(node))
    if config is None:
        checks.append(Check("shared memory", check_shared_memory))
        checks.append(
            Check("Transformer Engine", lambda: machine.check_transformer_engine(num_gpus))
        )
    else:
        checks += [*CHECKS, *_run_checks(node, kernels.CARDS.get(gpu) or machine.first_card())]
    found = Found(config, world_size, By.DOCTOR, num_ranks)
    for check in (*checks, Check("patches", patches.findings)):
        for finding in found.do(check):
            lacks_remedy = finding.level == PROBLEM and not finding.remedy
            yield replace(finding, remedy=_REMEDY) if lacks_remedy else finding
    for reward in found.rewards:
        reward.close()


def _machine_checks(node: machine.Node) -> Iterator[Check]:
    """Yield the checks that need no configuration."""
    num_gpus = node.num_gpus
    nodes = -(-node.world_size // node.num_ranks)
    yield Check("versions", lambda: machine.check_versions(cuda=bool(num_gpus)))
    yield Check("devices", lambda: machine.check_devices(node, os.cpu_count() or 1))
    yield Check("GPU", lambda: machine.check_capability(num_gpus))
    yield Check("cuDNN", lambda: kernels.check_cudnn(num_gpus))
    version_of = machine.installed_version
    yield Check(
        "flashinfer", lambda: kernels.check_warm_up(num_gpus, nodes, version_of, os.environ)
    )
    rendezvous = os.environ.get("MASTER_PORT")
    if rendezvous and os.environ.get("RANK") is None:
        name = "MASTER_PORT"
        yield Check(name, lambda: machine.check_port(name, "127.0.0.1", rendezvous))


def _run_checks(node: machine.Node, card: str | None) -> Iterator[Check]:
    """Yield the checks of a configuration for which a start has no time, or which are facts."""
    yield Check("configuration", job_facts.facts_of_job)
    yield Check("KV pools", job_facts.check_pools)
    yield Check("kernels", lambda config: _kernel_findings(config, node, card))
    yield Check("room", lambda config: memory.check_room(config, node))


def _kernel_findings(config: RunConfig, node: machine.Node, card: str | None) -> Findings:
    with suppress(ValueError):  # preflight has said so
        hf = read_hf_facts(config_directory(config.model.hf_checkpoint)[0])
        yield from kernels.check_attention(config, hf, node.num_gpus)
        yield from kernels.check_tuned_experts(config, hf, card, os.environ)
