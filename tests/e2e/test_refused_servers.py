"""A real server of somebody else's whose routes would be wrong is refused before a run begins."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from r3train.cli import main
from r3train.engine.server import SGLangServer
from tests.unit.launch.test_preflight import ROOT, start

pytestmark = pytest.mark.e2e
# written back alone, a host tier is not touched before the cache is full: a CPU has no kernel for it
HOST_TIER = {
    "enable_hierarchical_cache": True,
    "hicache_size": 1,
    "hicache_write_policy": "write_back",
}


@pytest.fixture(scope="module")
def host_tier(tiny, tmp_path_factory):
    """Address of a server that returns routes and keeps a host tier of its cache."""
    log = tmp_path_factory.mktemp("host_tier") / "sglang.log"
    # as somebody else would start it: nothing here would with routes
    flags = {"enable_return_routed_experts": True, **HOST_TIER}
    with SGLangServer(tiny / "model", log, server_args=flags, start_timeout_s=200) as server:
        yield server.addr


def test_a_server_with_a_host_tier_is_refused_by_dry_run_start_and_doctor(host_tier, tiny):
    address = ["--rollout-external-engine-addrs", host_tier]
    refused = (
        f"engine http://{host_tier} runs with enable_hierarchical_cache = True, which cannot go with"
        " --use-rollout-routing-replay"
    )
    for more in (["--dry-run"], []):
        result = start(tiny, *address, *more)
        assert result.exit_code == 2 and refused in " ".join(result.output.split()), result.output
    result = start(tiny, *address, "--dry-run", "--no-use-rollout-routing-replay")
    assert result.exit_code == 0, result.output
    flags = ["--config", str(ROOT / "configs/tiny_cpu.toml"), "--world-size", "2", *address]
    flags += ["--hf-checkpoint", str(tiny / "model"), "--prompt-data", str(tiny / "prompts.jsonl")]
    result = CliRunner().invoke(main, ["doctor", *flags, "--use-rollout-routing-replay"])
    assert result.exit_code == 1 and refused in " ".join(result.output.split()), result.output


def test_a_server_without_one_is_accepted(engine, tiny):
    result = start(tiny, "--dry-run", "--rollout-external-engine-addrs", engine)
    assert result.exit_code == 0, result.output
