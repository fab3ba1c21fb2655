"""r3train.schema.json is what editors see: recipes fit it, and mistakes in one do not."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from r3train.config import RunConfig
from r3train.config.sources import places

ROOT = Path(__file__).parents[2]
SCHEMA = ROOT / "r3train.schema.json"
RECIPES = sorted([*ROOT.glob("configs/**/*.toml"), *ROOT.glob("examples/**/*.toml")])
VALIDATOR = Draft202012Validator(json.loads(SCHEMA.read_text()))


def faults(text: str) -> list[str]:
    return [error.message for error in VALIDATOR.iter_errors(tomllib.loads(text))]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_names_the_schema_in_its_first_line_and_fits_it(path):
    text = path.read_text()
    first = text.splitlines()[0]
    assert first.startswith("#:schema ")
    assert (path.parent / first.removeprefix("#:schema ")).resolve() == SCHEMA
    assert faults(text) == []


def test_every_resolved_configuration_fits_and_every_field_is_described():
    flags = dict(hf_checkpoint="m", prompt_data=["p"], num_rollout=1, rollout_batch_size=1)
    made = RunConfig.from_sources(flags=flags | dict(rollout_max_response_len=8, save="ck"))
    assert faults(made.to_toml()) == []
    tables = VALIDATOR.schema["$defs"]
    for place in places(RunConfig).values():
        kind = RunConfig.model_fields[place.section].annotation.__name__
        field = tables[kind]["properties"][place.name]
        assert field["description"].startswith(" ".join(place.info.description.split()))


def test_the_text_of_a_setting_says_what_it_needs():
    field = VALIDATOR.schema["$defs"]["ParallelSection"]["properties"]["sequence_parallel"]
    assert field["description"].endswith("Needs --tensor-model-parallel-size above 1.")


@pytest.mark.parametrize(
    "text, fault",
    [
        ("[trainer]\nlearning_rate = 1.0", "'learning_rate' was unexpected"),
        ("[trainr]\nlr = 1.0", "'trainr' was unexpected"),
        ("[trainer]\nlr = 'fast'", "'fast' is not of type 'number'"),
        ("[trainer]\noptimizer = 'adan'", "'adan' is not one of ['adam', 'sgd']"),
        ("[rollout]\nnum_rollout = 0", "0 is less than the minimum of 1"),
        ("[run]\nplot = 1", "1 is not of type 'boolean'"),
        ("[data]\ncustom_rm_path = 'path/rw.py'", "'path/rw.py' does not match"),
        (
            "[[eval.datasets]]\nname = 'a'\npath = 'b'\ntemprature = 1",
            "'temprature' was unexpected",
        ),
        ("[[eval.datasets]]\nname = 'a'", "'path' is a required property"),
        (
            "[model.transformer_overrides]\na = {b = 1}",
            "is not valid under any of the given schemas",
        ),
    ],
)
def test_a_wrong_recipe_does_not_fit(text, fault):
    (found,) = faults(text)
    assert fault in found
