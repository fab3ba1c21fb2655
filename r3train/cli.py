"""The ``r3train`` console command: small tools beside train_async.py."""

from __future__ import annotations

import importlib

import click

# name -> (where its click command lives, one line of help); imported only when it is called,
# so that --help needs neither torch nor transformers
SUBCOMMANDS = {
    "make-tiny-model": (
        "r3train.tiny:make_tiny_model",
        "Write a tiny random Qwen3-MoE checkpoint and a task that it can learn.",
    ),
    "serve": (
        "r3train.launch.serve:serve",
        "Run one SGLang server as a configuration asks, for trainers on other nodes.",
    ),
    "doctor": (
        "r3train.doctor.command:doctor",
        "Look for what will go wrong on this machine with this configuration.",
    ),
    "check-evidence": (
        "r3train.proof.command:check_evidence",
        "Judge a run's R3 evidence: passed, failed (what and where), or no evidence.",
    ),
    "verify": (
        "r3train.verify.command:verify_command",
        "Hold replay against two oracles in every topology, planted bugs included.",
    ),
    "report": (
        "r3train.observe.report:report",
        "Write one or several runs as a self-contained HTML page.",
    ),
}


class LazyGroup(click.Group):
    """A group that imports a subcommand's module when the subcommand is asked for."""

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
    """Tools beside train_async.py."""


if __name__ == "__main__":
    main()
