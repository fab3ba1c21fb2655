"""The ``r3train`` console command."""

from __future__ import annotations

import importlib

import click

from r3train.cpu.torchvision_stub import declare_ops_for_imports

# name -> (module:function, one line of help); a module is imported when its command is called, so
# that --help needs neither torch nor transformers
SUBCOMMANDS = {
    "train": (
        "r3train.launch.start_ranks:train_command",
        "Train: start the ranks of this machine.",
    ),
    "recipes": (
        "r3train.cli:recipes",
        "List the recipes that --config knows by name.",
    ),
    "make-tiny-model": (
        "r3train.verify.tiny:make_tiny_model",
        "Write a tiny random Qwen3-MoE checkpoint and a task that it can learn.",
    ),
    "serve": (
        "r3train.launch.serve:serve",
        "Run one SGLang server as a configuration asks, for trainers on other nodes.",
    ),
    "eval": (
        "r3train.launch.eval_command:evaluate_command",
        "Evaluate a checkpoint on the evaluation sets of a configuration, without training.",
    ),
    "convert": (
        "r3train.launch.convert:convert",
        "Write the weights of a run's checkpoint as a Hugging Face checkpoint.",
    ),
    "doctor": (
        "r3train.doctor.doctor_command:doctor",
        "Check this machine for faults that would stop a run of this configuration.",
    ),
    "estimate": (
        "r3train.launch.estimate_command:estimate",
        "Say what a recipe will hold, and which topologies fit, from config.json alone.",
    ),
    "check-evidence": (
        "r3train.audit.check_evidence:check_evidence",
        "Judge a run's R3 evidence: passed, failed (with every fault), or no evidence.",
    ),
    "verify": (
        "r3train.verify.verify_command:verify_command",
        "Compare replay with two oracles in every topology; also with planted bugs.",
    ),
    "compare": (
        "r3train.launch.compare_runs:compare",
        "Say where two runs first differ: setting, metric, token, agreement by layer.",
    ),
    "report": (
        "r3train.report.report_page:report",
        "Write one or several runs as a self-contained HTML page.",
    ),
}


class LazyGroup(click.Group):
    """A group that imports the module of a subcommand when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(SUBCOMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in SUBCOMMANDS:
            return None
        module, _, attribute = SUBCOMMANDS[cmd_name][0].partition(":")
        return getattr(importlib.import_module(module), attribute)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in SUBCOMMANDS.items()])


@click.group(cls=LazyGroup)
@click.version_option(package_name="r3train")
def main() -> None:
    """Train mixture-of-experts models by reinforcement, with rollout routing replay, and prove it."""
    declare_ops_for_imports()


@click.command()
def recipes() -> None:
    """List the recipes that --config knows by name, with one line each."""
    from r3train.config.recipes import recipe_line, recipe_names

    for name in recipe_names():
        click.echo(f"{name:28s}{recipe_line(name)}")


if __name__ == "__main__":
    main()
