"""examples/kubernetes/jobset.yaml: read by the typed models of the JobSet API, and by r3train's own flags."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path

import pytest
import yaml
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet
from pydantic import ValidationError

from r3train.config.cross_checks import check_static
from r3train.config.options import parse_train_flags
from r3train.commands.serve import serve
from r3train.launch.start.start_ranks import OPTIONS, without

MANIFEST = Path(__file__).resolve().parents[3] / "examples/kubernetes/jobset.yaml"


def manifest() -> dict:
    return yaml.safe_load(MANIFEST.read_text())


def unknown(found, known, place: str = "") -> list[str]:
    """The keys that the API does not have: its models leave them out."""
    if isinstance(found, dict):
        gone = [f"{place}.{key}" for key in found.keys() - known.keys()]
        return gone + [
            line
            for key in found.keys() & known.keys()
            for line in unknown(found[key], known[key], f"{place}.{key}")
        ]
    if isinstance(found, list):
        return list(itertools.chain(*map(unknown, found, known, [place] * len(found))))
    return [] if found == known else [place]


def check(content: dict) -> list[str]:
    return unknown(content, JobsetV1alpha2JobSet.from_dict(copy.deepcopy(content)).to_dict())


def test_the_api_has_every_key_of_the_manifest():
    assert check(manifest()) == []


def test_a_key_or_kind_that_the_api_does_not_have_is_found():
    content = manifest()
    pod = content["spec"]["replicatedJobs"][1]["template"]["spec"]["template"]["spec"]
    pod["containers"][0]["volumeMount"] = []
    assert check(content) == [
        ".spec.replicatedJobs.template.spec.template.spec.containers.volumeMount"
    ]
    del pod["containers"][0]["volumeMount"]
    pod["terminationGracePeriodSeconds"] = "long"
    with pytest.raises(ValidationError, match="terminationGracePeriodSeconds"):
        check(content)


def test_its_pods_meet_one_another_and_have_time_to_save():
    content = manifest()
    name = content["metadata"]["name"]
    jobs = {job["name"]: job["template"]["spec"] for job in content["spec"]["replicatedJobs"]}
    pods = {name: job["template"]["spec"] for name, job in jobs.items()}
    words = {}
    for each, pod in pods.items():
        (container,) = pod["containers"]
        words[each] = [*container["command"], *container["args"]]
        assert words[each][:2] == ["r3train", each] and words[each][3] == "qwen3_30b_a3b"
    train = words["train"][2:]
    nodes = jobs["train"]["parallelism"]
    assert jobs["train"]["completions"] == nodes and f"--nnodes={nodes}" in train
    assert f"--rdzv-endpoint={name}-train-0-0.{name}:29500" in train
    config = parse_train_flags(without(OPTIONS, train), prog_name="train")
    gpus = int(pods["train"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
    assert f"--nproc-per-node={gpus}" in train
    check_static(config, nodes * gpus)
    assert pods["train"]["terminationGracePeriodSeconds"] > config.faults.signal_grace_s
    with serve.make_context("serve", words["serve"][2:]) as context:
        given = context.params
    assert config.rollout.rollout_external_engine_addrs == (f"{given['host']}:{given['port']}",)
    assert given["host"] == f"{name}-serve-0-0.{name}"
    probe = pods["serve"]["containers"][0]["readinessProbe"]["httpGet"]
    assert probe["port"] == given["port"]
