"""The layers of each rank: our arithmetic against Megatron's own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from r3train.cpu.device import prepare_device
from r3train.config.pipeline_layout import chunk_layer_numbers, stage_layer_numbers
from r3train.routing.layers import recomputed_layers

SHAPES = [
    # layers, pp, vpp, first, last
    (4, 1, 1, None, None),
    (8, 2, 1, None, None),
    (8, 2, 2, None, None),
    (8, 4, 2, None, None),
    (27, 2, 1, 13, None),
    (27, 2, 1, 13, 14),
    (61, 4, 1, 14, 15),
    (60, 4, 2, 14, 14),
    (6, 4, 1, 1, 1),
    (48, 4, 3, None, None),
    (46, 4, 1, None, 10),
]


@pytest.mark.parametrize("num_layers, pp, vpp, first, last", SHAPES)
def test_stages_hold_the_layers_that_megatron_would_build(num_layers, pp, vpp, first, last):
    prepare_device()
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    config = SimpleNamespace(
        num_layers=num_layers,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
        num_layers_in_first_pipeline_stage=first,
        num_layers_in_last_pipeline_stage=last,
        pipeline_model_parallel_layout=None,
        account_for_embedding_in_pipeline_split=False,
        account_for_loss_in_pipeline_split=False,
    )
    expected = []
    for rank in range(pp):
        chunks = []
        for v in range(vpp):
            stage = v if vpp > 1 else None
            offset = get_transformer_layer_offset(config, stage, rank)
            count = get_num_layers_to_build(config, stage, rank)
            chunks.append(tuple(range(offset + 1, offset + count + 1)))
        expected.append(chunks)
    assert stage_layer_numbers(num_layers, pp, vpp_size=vpp, first=first, last=last) == expected
    every = sorted(n for stage in expected for chunk in stage for n in chunk)
    assert every == list(range(1, num_layers + 1))


def test_61_layers_over_4_stages_and_2_virtual_ones_with_uneven_ends_by_an_explicit_layout():
    prepare_device()
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    # the ends also hold the embedding and the output
    layout = PipelineParallelLayerLayout.from_str("Et*7|(t*8|)*6t*6L", 4)
    stages = chunk_layer_numbers([[7, 8, 8, 8], [8, 8, 8, 6]])
    for rank in range(4):
        for v in range(2):
            decoder = layout.layout[rank][v]
            assert len(stages[rank][v]) == sum(x.name == "decoder" for x in decoder)
    assert stages[0] == [tuple(range(1, 8)), tuple(range(32, 40))]
    assert stages[3] == [tuple(range(24, 32)), tuple(range(56, 62))]


def test_61_layers_cannot_be_split_evenly_over_virtual_stages():
    with pytest.raises(ValueError, match="must divide by virtual_pipeline"):
        stage_layer_numbers(61, 4, vpp_size=2, first=15, last=14)


@pytest.mark.parametrize("first, last", [(None, None), (20, 8), (5, None)])
def test_layers_that_do_not_divide_are_refused(first, last):
    with pytest.raises(ValueError, match="do not divide"):
        stage_layer_numbers(27, 4, vpp_size=1, first=first, last=last)


def test_recomputed_layers_follow_granularity_and_method():
    def layers(granularity, method=None, num_layers=None, modules=()):
        return recomputed_layers(
            (3, 4, 5),
            granularity=granularity,
            method=method,
            num_layers=num_layers,
            modules=modules,
        )

    assert layers(None) == ()
    assert layers("full", "uniform", 2) == (3, 4, 5)
    assert layers("full", "block", 2) == (3, 4)
    assert layers("selective", modules=("moe",)) == (3, 4, 5)
    assert layers("selective", modules=("core_attn",)) == ()
    assert layers("full", "block") == ()  # of no layer, as Megatron reads no number
    assert layers(None, modules=("moe",)) == ()


@pytest.mark.parametrize(
    "num_layers, pp, first, last, message",
    [
        (27, 1, 20, None, r"one pipeline stage holds all 27 layers, not \[20\]"),
        (27, 1, None, 26, r"one pipeline stage holds all 27 layers, not \[26\]"),
        (27, 2, 13, 13, "1 layers are left for 0 stages"),
        (27, 3, 20, 9, "-2 layers are left for 1 stages"),
    ],
)
def test_ends_that_do_not_add_up_are_refused(num_layers, pp, first, last, message):
    with pytest.raises(ValueError, match=message):
        stage_layer_numbers(num_layers, pp, vpp_size=1, first=first, last=last)


def test_one_stage_may_name_all_its_layers():
    assert stage_layer_numbers(3, 1, vpp_size=1, first=3, last=None) == [[(1, 2, 3)]]
