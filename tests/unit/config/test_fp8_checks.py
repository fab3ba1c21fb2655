"""Rules of --rollout-weights fp8 against the checkpoint."""

from __future__ import annotations

import pytest

from r3train.families.checks.settings_checks import check_model
from r3train.families.read_facts import read_hf_facts
from r3train.families.tiny_options import TinyOptions
from r3train.verify.tiny import build
from tests.unit.config.test_config import config

# of whole blocks: two heads of keys, experts of two blocks
SHAPE = dict(num_layers=1, hidden_size=128, num_heads=4, head_dim=128, moe_intermediate_size=256)
# servers of so many ranks that hold whole blocks
FIT = [dict(), dict(tp_size=2), dict(tp_size=4, ep_size=4), dict(tp_size=4, ep_size=2)]
# what does not, and what is said of it
UNFIT = [
    ({}, dict(hidden_size=192), "192 columns of model.layers.0.self_attn.q_proj.weight"),
    ({}, dict(head_dim=32), "64 rows of model.layers.0.self_attn.q_proj.weight"),
    (
        {},
        dict(moe_intermediate_size=96),
        "96 rows of model.layers.0.mlp.experts.{e}.gate_proj.weight",
    ),
    (dict(tp_size=4), {}, "64 rows of model.layers.0.mlp.experts.{e}.gate_proj.weight"),
    (dict(tp_size=8), {}, "64 rows of model.layers.0.self_attn.q_proj.weight"),
]


def check(directory, servers, **shape) -> None:
    build(directory, TinyOptions(**SHAPE | shape))
    hf = read_hf_facts(directory / "model")
    settings = dict(hf_checkpoint=hf.path, bf16=True, rollout_weights="fp8", sglang=servers)
    check_model(config(**settings), hf, 1)


@pytest.mark.parametrize("servers", FIT, ids=str)
def test_servers_whose_ranks_hold_whole_blocks_pass(servers, tmp_path):
    check(tmp_path, servers)


@pytest.mark.parametrize("servers, shape, said", UNFIT, ids=str)
def test_a_matrix_that_blocks_do_not_divide_is_named_before_a_server_starts(
    servers, shape, said, tmp_path
):
    with pytest.raises(ValueError, match="--rollout-weights fp8: .*a multiple of 128") as error:
        check(tmp_path, servers, **shape)
    assert f": {said} on a rank of a server" in str(error.value)


def test_a_family_that_was_not_seen_on_servers_of_fp8_is_refused_by_name(tmp_path):
    text = r"was not seen to serve gpt_oss right in fp8 \(it was with .*qwen3_moe.*\)"
    with pytest.raises(ValueError, match=text):
        check(tmp_path, {}, family="gpt_oss")
