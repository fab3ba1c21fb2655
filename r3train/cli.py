"""The ``r3train`` console command."""

from __future__ import annotations

import importlib
import sys
from io import TextIOWrapper

import click
from click.shell_completion import CompletionItem

from r3train.cpu.torchvision_stub import declare_ops_for_imports

# name -> (module:function, one line of help); a module is imported when its command is called, so
# that --help needs neither torch nor transformers
SUBCOMMANDS = {
    "train": (
        "r3train.launch.start.start_ranks:train_command",
        "Train: start the ranks of this machine.",
    ),
    "recipes": (
        "r3train.commands.look_up:recipes",
        "List the recipes that --config knows by name.",
    ),
    "explain": (
        "r3train.commands.look_up:explain",
        "Say all about one setting, or what a run's log-prob gap is made of.",
    ),
    "docs": (
        "r3train.commands.look_up:docs",
        "Show a page of the documentation.",
    ),
    "make-tiny-model": (
        "r3train.verify.tiny:make_tiny_model",
        "Write a tiny random Qwen3-MoE checkpoint and a task that it can learn.",
    ),
    "serve": (
        "r3train.commands.serve:serve",
        "Run one SGLang server as a configuration asks, for trainers on other nodes.",
    ),
    "eval": (
        "r3train.commands.eval_command:evaluate_command",
        "Evaluate a checkpoint on the evaluation sets of a configuration, without training.",
    ),
    "convert": (
        "r3train.commands.convert:convert",
        "Write the weights of a run's checkpoint as a Hugging Face checkpoint.",
    ),
    "agent-check": (
        "r3train.commands.agent_check:agent_check",
        "Play one session of an agent's command against a scripted model, without a server.",
    ),
    "doctor": (
        "r3train.doctor.doctor_command:doctor",
        "Check this machine for faults that would stop a run of this configuration.",
    ),
    "estimate": (
        "r3train.commands.estimate_command:estimate",
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
        "r3train.commands.compare_runs:compare",
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

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the words; a flag before the command is told where flags stand."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            error.message += " Flags stand behind the command: r3train train --config ..."
            raise

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a command, or name the nearest one."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            # they import pydantic, which --help does without
            from r3train.config.peers import removed
            from r3train.config.sources import closest

            error.message += removed("", args[0]) or closest(args[0], SUBCOMMANDS)
            raise

    def invoke(self, ctx: click.Context) -> object:
        """Call a command; a flag that it had a release ago is answered with what to use instead."""
        try:
            return super().invoke(ctx)
        except click.NoSuchOption as error:
            from r3train.config.peers import removed  # as above

            if instead := removed(error.option_name, ctx.invoked_subcommand or ""):
                if not error.message.endswith(instead):  # r3train train has said it
                    error.message, error.possibilities = f"{error.message}{instead}", None
            raise

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the commands that begin with a word, without their modules, which take seconds."""
        fits = [item for item in SUBCOMMANDS.items() if item[0].startswith(incomplete)]
        return [CompletionItem(name, help=text) for name, (_, text) in fits]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in SUBCOMMANDS.items()])


@click.group(cls=LazyGroup)
@click.version_option(package_name="r3train")
def main() -> None:
    """Train mixture-of-experts models by reinforcement, with rollout routing replay, and prove it."""
    declare_ops_for_imports()
    if isinstance(sys.stdout, TextIOWrapper):  # a character that the terminal lacks is spelled out
        sys.stdout.reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    main()
