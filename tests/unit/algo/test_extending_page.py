"""The examples of docs/guide/extending.md do what the page says, through production's loaders."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.unit.algo.rollouts import advantages
from tests.unit.rewards.test_scoring import sample, scored

from r3train.algo.rule_checks import check_algorithm
from r3train.algo.losses.policy_losses import get_policy_loss
from r3train.algo.policy_loss import microbatch_loss
from r3train.algo.loss_rows import LossRows
from r3train.config.algorithm_settings import AlgorithmSection
from r3train.config.data_settings import DataSection
from r3train.environments import Turn, get_environment
from r3train.types import Prompt

PAGE = (Path(__file__).parents[3] / "docs/guide/extending.md").read_text()


@pytest.fixture(autouse=True)
def modules(tmp_path, monkeypatch):
    """The page's code, each block in the file that its first line names."""
    for name, code in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE, flags=re.S):
        (tmp_path / name).write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))


def prompt(label):
    return Prompt("p.jsonl:1", 0, "", np.zeros(1, np.int32), label)


def test_the_reward():
    data = DataSection(prompt_data="-", custom_rm_path="my_reward:short_answer")
    answers = [sample(text, label="four") for text in (" four", "five")]
    assert scored(data, *answers) == pytest.approx([0.95, -0.04])


def test_the_reward_of_a_group():
    data = DataSection(prompt_data="-", custom_rm_path="my_group_reward:shortest", group_rm=True)
    answers = [sample("x" * length) for length in (5, 2, 3)]
    assert scored(data, *answers, group=True) == [0.0, 1.0, 0.0]


async def test_the_environment():
    episode = get_environment("my_environment:Guess")(prompt(7))
    answers = [await episode.step(Turn(i, [], text, False)) for i, text in enumerate("5x97")]
    assert [a.observation for a in answers] == ["more", "a number, please", "less", "right"]
    assert [a.done for a in answers] == [False, False, False, True]
    assert sum(a.reward for a in answers) == pytest.approx(0.9)


def test_the_advantage_estimator():
    name = "my_advantage:best_of_group"
    check_algorithm(AlgorithmSection(advantage_estimator=name), 2)
    got = advantages([[1.0, 0.0, 0.5], [3.0, 3.0, 0.0]], advantage_estimator=name)
    np.testing.assert_array_equal(got, [[0.5, 0, 0], [1, 1, 0]])
    with pytest.raises(ValueError, match="at least 2, got 1"):
        check_algorithm(AlgorithmSection(advantage_estimator=name), 1)


def test_the_policy_loss():
    algorithm = AlgorithmSection(policy_loss="my_loss:reinforce")
    check_algorithm(algorithm, 8)
    new = torch.tensor([-1.0, -6.0, -9.0], requires_grad=True)
    rows = LossRows(
        log_probs=new,
        old_log_probs=new.detach(),
        rollout_log_probs=new.detach(),
        advantages=torch.tensor([2.0, -1.0, 5.0]),
        mask=torch.tensor([True, True, False]),
        entropy=torch.zeros(3),
        samples=torch.tensor([0, 0, 0]),
        loss_weights=torch.ones(1),
    )
    out = microbatch_loss(get_policy_loss(algorithm.policy_loss), rows, algorithm)
    out.loss.backward()
    assert out.loss.item() == 2.0 - 6.0 and out.sums["unlikely"].item() == 1
    assert new.grad.tolist() == [-2.0, 1.0, 0.0]
