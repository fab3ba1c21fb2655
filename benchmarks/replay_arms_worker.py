"""The rank of the study of gradients: a dumped rollout through the actor's train pass, once for each arm.

Started by ``benchmarks.replay_arms`` under torchrun; writes what it found as JSON.
"""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from r3train.cpu.device import prepare_device

DEVICE = prepare_device()

import torch  # noqa: E402
from megatron.core import parallel_state  # noqa: E402

from r3train.config import RunConfig  # noqa: E402
from r3train.launch.build_actor import build_actor  # noqa: E402
from r3train.launch.job import Job  # noqa: E402
from r3train.launch.preflight import preflight  # noqa: E402
from r3train.launch.resume import resume_point  # noqa: E402
from r3train.layout.microbatch import slice_microbatch  # noqa: E402
from r3train.loop.distribute import gather_topologies  # noqa: E402
from r3train.loop.prepare import prepare, train_samples  # noqa: E402
from r3train.loop.replay_source import load_rollout  # noqa: E402
from r3train.trainer.megatron import topology  # noqa: E402
from r3train.trainer.megatron.loss_metrics import reduce_metrics  # noqa: E402

ACTORS = {"float32": False, "bfloat16": True}
REPLAY = {"use_rollout_routing_replay": True}
LIVE = {"use_rollout_routing_replay": False}
# arm -> settings of [replay] and [algorithm]; ess is that of the weights of whole answers
SEQUENCE = {"rollout_is": "sequence"}
ARMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "live router": (LIVE, {}),
    "R2": (LIVE | {"use_routing_replay": True}, {}),
    "R3": (REPLAY, {}),
    "live router, token TIS": (LIVE, {"rollout_is": "token"}),
    "live router, sequence weights": (LIVE, SEQUENCE),
    "R3, sequence weights": (REPLAY, SEQUENCE),
    "live router, dppo_tv": (LIVE, {"policy_loss": "dppo_tv"}),
}
REFERENCE = ("float32", "R3")
EVERYWHERE = ("live router", "R2", "R3")  # the other arms are of an actor in float32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, required=True, help="resolved configuration")
    parser.add_argument("--rollouts", type=Path, required=True, help="directory of the dump")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    config = RunConfig.from_toml(arguments.config)
    job = preflight(config, 1)
    topology.init_distributed("auto", config.parallel.distributed_timeout_minutes)
    groups = load_rollout(arguments.rollouts, 0)
    samples, _ = train_samples(groups, config.algorithm, config.rollout.rollout_max_response_len)
    found: dict[str, Any] = {"actors": {dtype: {} for dtype in ACTORS}}
    reference, at_reference = gradients(arm(job, *REFERENCE), samples)
    for dtype, name in ((dtype, name) for dtype in ACTORS for name in ARMS):
        if (dtype, name) == REFERENCE:
            found["actors"][dtype][name] = against(reference, reference, at_reference)
        elif dtype == REFERENCE[0] or name in EVERYWHERE:
            own, metrics = gradients(arm(job, dtype, name), samples)
            found["actors"][dtype][name] = against(reference, own, metrics)
    # of the prompts of either half: the same policy's gradient on other samples
    middle = len(groups[0]) * (len(groups) // 2)
    halves = [gradients(arm(job, *REFERENCE), s)[0] for s in (samples[:middle], samples[middle:])]
    found["halves"] = against(*halves, {})
    arguments.output.write_text(json.dumps(found), encoding="utf-8")
    topology.shutdown()


def arm(job: Job, dtype: str, name: str) -> Job:
    """The job with an arm's settings."""
    replay, algorithm = ARMS[name]
    replay = replay | {"enable_r3_correctness_check": False}
    sections = {"model": {"bf16": ACTORS[dtype]}, "replay": replay, "algorithm": algorithm}
    changed = {
        section: getattr(job.config, section).model_copy(update=fields)
        for section, fields in sections.items()
    }
    return replace(job, config=job.config.model_copy(update=changed))


def gradients(job: Job, samples: Any) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """{parameter: its gradient, float64} of one train pass, and the pass's metrics."""
    actor = build_actor(job, DEVICE, resume_point(job))
    topologies = gather_topologies(actor.topology)
    shape = job.hf.route_shape
    prepared = prepare(0, samples, job.config, job.hf, shape, topologies, passes=())
    slices = [slice_microbatch(m, actor.topology) for m in prepared.microbatches[0]]
    old = None
    if not job.config.reuses_log_probs:
        old = actor.compute_log_probs(slices, "old_log_prob")
    results = actor.backward(slices, old, None)
    metrics = reduce_metrics(results, actor.topology, actor._metric_names, DEVICE)
    (chunk,) = actor.model.unwrapped
    found = {
        name: p.main_grad.detach().double().flatten().clone()
        for name, p in chunk.named_parameters()
    }
    parallel_state.destroy_model_parallel()
    return found, metrics


def against(
    reference: dict[str, torch.Tensor],
    found: dict[str, torch.Tensor],
    metrics: dict[str, float],
) -> dict[str, Any]:
    """(cosine, ratio of norms, norm of the difference over the reference's) of parts of the gradient."""
    names = list(reference)
    layers = sorted({layer_of(n) for n in names} - {None})
    parts = {
        "all": names,
        "router": [n for n in names if ".router." in n],
        "layers": [[n for n in names if layer_of(n) == layer] for layer in layers],
        "routers": [
            [n for n in names if layer_of(n) == layer and ".router." in n] for layer in layers
        ],
    }

    def compare(part: list[str]) -> tuple[float, float, float]:
        a, b = (torch.cat([of[n] for n in part]) for of in (reference, found))
        cosine = a @ b / (a.norm() * b.norm())
        return float(cosine), float(b.norm() / a.norm()), float((b - a).norm() / a.norm())

    compared: dict[str, Any] = {
        name: [compare(p) for p in part] if isinstance(part[0], list) else compare(part)
        for name, part in parts.items()
    }
    if metrics:
        compared |= {"k3": metrics["log_prob_gap_k3"], "ess": metrics["ess"]}
        compared |= {"chi2_seq": metrics["chi2_seq"], "dropped": metrics.get("clipped", 0.0)}
    return compared


def layer_of(parameter: str) -> int | None:
    """The 0-based layer in a parameter's name, None outside of the layers."""
    found = re.search(r"\.layers\.(\d+)\.", parameter)
    return None if found is None else int(found.group(1))


if __name__ == "__main__":
    main()
