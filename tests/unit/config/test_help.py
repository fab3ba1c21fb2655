"""Help is short, by section or whole; one setting is explained; the shell completes."""

from __future__ import annotations

import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

import train_async
from r3train.cli import main
from r3train.config.help_text import (
    HOOKS,
    MOST_USED,
    PASSTHROUGH_HELP,
    explained,
    find_setting,
    is_hook,
    sections,
    settings_of,
    usage,
)
from r3train.config.recipes import recipe_names
from r3train.config.run import RunConfig
from r3train.config.sources import flag_name, places

PLACES = places(RunConfig)


def asked(*words: str, code: int = 0) -> str:
    """The output of r3train on a screen of 80 columns."""
    result = CliRunner(env={"COLUMNS": "80"}).invoke(main, words)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result.output


def named(output: str) -> set[str]:
    """The settings that a help names at the beginning of a line."""
    firsts = {
        line.strip().split("  ")[0].split()[0] for line in output.splitlines() if line.strip()
    }
    return {
        name for name, place in PLACES.items() if firsts & {usage(place).split()[0], place.flag}
    }


def test_the_first_help_is_two_screens_of_the_settings_that_most_runs_give():
    output = asked("train", "--help")
    assert named(output) == set(MOST_USED) and 25 <= len(MOST_USED) <= 30
    assert len(output.splitlines()) <= 80 and max(map(len, output.splitlines())) <= 80
    for name in sections():
        assert f"\n  {name} " in output
    assert asked("train", "-h", "--nonsense") == output


def test_every_section_has_its_own_settings_and_together_they_have_all():
    left = set(PLACES)
    for section in sections():
        output = asked("train", "--help", section)
        assert output == asked("train", f"--help={section}")
        found = named(output)
        assert found == {place.name for place in settings_of(section)} and found <= left
        left -= found
    assert not left
    assert named(asked("train", "--help-all")) == set(PLACES)


def test_test_hooks_are_a_section_of_their_own_at_the_end():
    hooks = {place.name for place in PLACES.values() if is_hook(place)}
    assert (
        {"plant_bug", "plant_fault", "ci_test"} <= hooks == named(asked("train", "--help", HOOKS))
    )
    output = asked("train", "--help-all")
    last = output.index("Test hooks, ")
    assert all(output.index(flag_name(name)[2:] + " ", last) for name in hooks)
    assert list(sections())[-1] == HOOKS


def test_the_program_of_a_rank_has_the_same_help():
    output = CliRunner().invoke(train_async.main, ["--help", "lora"]).output
    assert named(output) == {place.name for place in settings_of("lora")}


def test_defaults_are_written_as_in_a_file():
    output = " ".join(asked("train", "--help-all").split()).replace("- ", "-")
    for default in ('["all-linear"]', "[0]", "on", "1e-06", "adam"):
        assert f"[default: {default}]" in output
    assert "True" not in output and ",)" not in output


@pytest.mark.parametrize(
    "words, said",
    [
        (("train", "--help", "rolout"), "no such section. Did you mean rollout? There are model,"),
        (("train", "--help", "tis_clip"), "r3train explain tis_clip looks for a setting"),
        (("explain", "tis-clp"), "tis-clp: no such setting. Did you mean tis_clip?"),
        (("explain", "trainer.tis_clip"), "no such setting. Did you mean algorithm.tis_clip?"),
        (("explain", "use_kl_loss"), "no such setting. Here it is kl_loss_coef above 0."),
        (("explain", "lora"), "a section: r3train train --help lora shows its settings"),
        (
            ("explain", "learning_rte"),
            "no such setting. Did you mean learning_rate? Here it is lr.",
        ),
        (("explain", "wandb"), "in their name: use_wandb, wandb_project, wandb_group, wandb_team,"),
        (("explain", "rollout/unheard_of"), "no such setting"),
        (("docs", "model"), "no such page. Did you mean models?"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(words, said):
    assert said in " ".join(asked(*words, code=2).split())


def test_a_metric_is_explained_with_its_unit():
    output = asked("explain", "rollout/truncated_share")
    assert output.startswith("rollout/truncated_share: ") and output.endswith(" [share]\n")


def test_a_setting_is_explained_by_any_of_its_names():
    output = asked("explain", "tis_clip")
    names = ("--tis-clip", "--tis_clip", "tis-clip", "algorithm.tis_clip", "algorithm.tis-clip")
    assert {asked("explain", name) for name in names} == {output}
    for said in (
        "algorithm.tis_clip\n",
        "--tis-clip NUMBER\n",
        "tis_clip in the table [algorithm]\n",
        "number, above 0\n",
        "default  2.0\n",
        "Upper bound of the weight of rollout_is.\n",
        "Cannot go with --loss-type sft.\n",
        "--tis-clip-low: is at most --tis-clip.\n",
        "docs/guide/algorithms.md",
    ):
        assert said in output
    assert asked("explain", "--no-plot") == asked("explain", "run.plot")
    assert "learning_rate" in asked("explain", "lr")
    for name in ("--sglang-tp-size", "sglang.tp_size", "--transformer-override", "datasets"):
        assert asked("explain", name).splitlines()[1].split(maxsplit=1)[1] in {
            text for text, _ in PASSTHROUGH_HELP.values()
        }


def test_every_setting_is_explained():
    for name, place in PLACES.items():
        output = "\n".join(explained(find_setting(name)))
        assert output.startswith(f"{place.section}.{name}\n  flag     ")
        assert "None" not in output and output.endswith("shows them.")


def test_pages_are_listed_and_shown():
    listed = asked("docs").splitlines()
    assert all("  " in line for line in listed)  # the columns of names and titles
    assert ["guide/models", "Models"] in [line.split() for line in listed]
    assert asked("docs", "models") == asked("docs", "docs/guide/models.md")
    assert asked("docs", "proof/r3").startswith("# ")


@pytest.mark.parametrize(
    "words, incomplete, found",
    [
        ([], "ma", {"make-tiny-model"}),
        (["train"], "--tis-c", {"--tis-clip", "--tis-clip-low"}),
        (["train", "--colocate"], "--no-plo", {"--no-plot"}),
        (["train", "--optimizer"], "", {"adam", "sgd"}),
        (["train", "--config"], "tiny", {name for name in recipe_names() if name[:4] == "tiny"}),
        (["train", "--recompute-modules", "moe", "--ws"], "", set()),
        (["explain"], "tis_clip_", {"tis_clip_low"}),
    ],
)
def test_the_shell_completes_commands_flags_and_values(words, incomplete, found):
    items = ShellComplete(main, {}, "r3train", "_R3TRAIN_COMPLETE").get_completions(
        words, incomplete
    )
    assert {item.value for item in items if item.type == "plain"} == found


def test_a_path_is_completed_by_the_shell():
    complete = ShellComplete(main, {}, "r3train", "_R3TRAIN_COMPLETE")
    for words in (["train", "--save"], ["train", "--config"]):
        assert complete.get_completions(words, "x")[0].type == "file"
