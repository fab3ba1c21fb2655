"""The doctor's model of transformers."""

from __future__ import annotations

import json

import numpy as np

from r3train.doctor.reference import load_reference
from r3train.families.tiny_options import TinyOptions
from r3train.verify.tiny import build


def test_steps_of_mamba_mixers_have_no_least_length_as_in_servers(tmp_path):
    build(tmp_path, TinyOptions(family="nemotron_h"))
    ids, file = np.arange(3, 20), tmp_path / "model/config.json"
    expected = load_reference(file.parent, bf16=False)(ids).log_probs
    config = json.loads(file.read_text())
    assert config["time_step_min"] < 1e-6
    file.write_text(json.dumps(config | {"time_step_min": 10.0}))
    np.testing.assert_array_equal(load_reference(file.parent, bf16=False)(ids).log_probs, expected)
