"""The ``r3train`` console command."""

from __future__ import annotations

import importlib
import shutil
import sys
import textwrap
from io import TextIOWrapper
from pathlib import Path

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
        "r3train.cli:recipes",
        "List the recipes that --config knows by name.",
    ),
    "explain": (
        "r3train.cli:explain",
        "Say all about one setting, or what a run's log-prob gap is made of.",
    ),
    "docs": (
        "r3train.cli:docs",
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
            from r3train.config.peers import removed
            from r3train.config.sources import closest

            error.message += removed("", args[0]) or closest(args[0], SUBCOMMANDS)
            raise

    def invoke(self, ctx: click.Context) -> object:
        """Call a command; a flag that it had a release ago is answered with what to use instead."""
        try:
            return super().invoke(ctx)
        except click.NoSuchOption as error:
            from r3train.config.peers import removed

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


def _settings(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """Return the settings that begin with a word, for the shell."""
    from r3train.config import RunConfig
    from r3train.config.sources import places

    word = incomplete.replace("-", "_")
    return [name for name in places(RunConfig) if name.startswith(word)]


@click.group(cls=LazyGroup)
@click.version_option(package_name="r3train")
def main() -> None:
    """Train mixture-of-experts models by reinforcement, with rollout routing replay, and prove it."""
    declare_ops_for_imports()
    if isinstance(sys.stdout, TextIOWrapper):  # a character that the terminal lacks is spelled out
        sys.stdout.reconfigure(errors="backslashreplace")


@click.command()
def recipes() -> None:
    """List the recipes that --config knows by name, with one line each."""
    from r3train.config.recipes import recipe_line, recipe_names

    width = min(shutil.get_terminal_size().columns, 120)
    for name in recipe_names():
        line = f"{name:28s}{recipe_line(name)}"
        click.echo(textwrap.fill(line, width, subsequent_indent=" " * 28))


def _is_run(name: str) -> bool:
    """True for a directory, unless its name is a bare word, which may be that of a setting, and it is no run."""
    path = Path(name)
    return path.is_dir() and (len(path.parts) > 1 or (path / "metrics.jsonl").exists())


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("name", shell_complete=_settings)
def explain(name: str) -> None:
    """Say all about the setting NAME: --tis-clip, tis_clip and algorithm.tis_clip are the same one.

    Of a metric, such as train/ess, say what it means.  Of a run directory, say what its log-prob gap is made of: which part dominates, since when, and which settings
    act on it.
    """
    if _is_run(name):
        from r3train.report.explain_run import explain_run

        try:
            lines = explain_run(Path(name))
        except ValueError as error:
            raise click.UsageError(str(error)) from None
        click.echo("\n".join(lines))
        return
    from r3train.config.help_text import explained, find_setting
    from r3train.config.options import usage_errors
    from r3train.observe.metric_table import row_of

    if "/" in name and (metric := row_of(name)) is not None:
        click.echo(f"{name}: {metric.meaning}" + (f" [{metric.unit}]" if metric.unit else ""))
        return
    with usage_errors():
        place = find_setting(name)
    width = min(shutil.get_terminal_size().columns, 100)
    for line in explained(place):
        indent = " " * 11 * line.startswith(" ")
        click.echo(textwrap.fill(line, width, subsequent_indent=indent, break_on_hyphens=False))


@click.command()
@click.argument("page", required=False)
def docs(page: str | None) -> None:
    """Show a page of the documentation (docs/ of a checkout), or list them: r3train docs models.

    The last part of a page's path is enough where no other page has it.
    """
    from r3train.config.help_text import PAGES
    from r3train.config.sources import closest

    names = sorted(str(file.relative_to(PAGES).with_suffix("")) for file in PAGES.rglob("*.md"))
    if page is None:
        width = max(map(len, names))
        for each in names:
            with (PAGES / f"{each}.md").open(encoding="utf-8") as file:
                title = next(line for line in file if line.startswith("# "))
            click.echo(f"{each:{width}s}  {title.strip('# ')}", nl=False)
        return
    name = page.removeprefix("docs/").removesuffix(".md")
    if name not in names:
        named = [each for each in names if each.rpartition("/")[2] == name]
        name = named[0] if len(named) == 1 else name
    if name not in names:
        short = [each.rpartition("/")[2] for each in names]
        near = closest(name, [*names, *short])
        raise click.UsageError(f"{page}: no such page.{near} r3train docs lists them")
    click.echo_via_pager((PAGES / f"{name}.md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
