"""``r3train agent-check``: one session of an agent against a scripted model, without a GPU or a server."""

from __future__ import annotations

import shlex
import sys

import click

from r3train.config.options import parse_train_flags, usage_errors
from r3train.launch.job.agent_session import columns, NONE_GIVEN, play_session
from r3train.user_code import find_modules_here

_UNUSED = (
    f"--hf-checkpoint {NONE_GIVEN} --prompt-data {NONE_GIVEN} --apply-chat-template --num-rollout 1 --rollout-batch-size 1"
    " --rollout-max-response-len 100000 --rollout-max-context-len 200000"
).split()
_WIDTH = 14


class _Command(click.Command):
    """A command whose flags end at ``--``; the words after it are another command's."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        at = args.index("--") if "--" in args else len(args)
        ctx.obj = args[at + 1 :]
        return super().parse_args(ctx, args[:at])


@click.command(cls=_Command, context_settings={"ignore_unknown_options": True})
@click.argument("flags", nargs=-1, type=click.UNPROCESSED, metavar="[FLAGS] -- COMMAND...")
@click.pass_obj
def agent_check(command: list[str], flags: tuple[str, ...]) -> None:
    """Play one session of COMMAND, as --agent-command would, against a scripted model: no GPU, no server.

    FLAGS are those of a run, --config FILE.toml and --agent among them: its model gives tokenizer and chat template,
    its data the task; without them both are this command's own.  The model calls each tool that a request offers
    once, with arguments that fit its schema: your tools run.  The exit code is 0 if the session works, else 1.
    """
    find_modules_here()
    has_config = any(word.partition("=")[0] == "--config" for word in flags)
    words = list(flags) if has_config else [*_UNUSED, *flags]
    if command:
        words += ["--agent", "none", "--agent-command", shlex.join(command)]
    config = parse_train_flags(words, prog_name="agent-check")
    with usage_errors():
        if config.agent.named is None:
            raise ValueError("no agent: expected -- COMMAND..., --agent or --agent-command")
        facts = play_session(config)
    for name, text in columns(facts).items():
        click.echo(f"{name:{_WIDTH}s}" + text.replace("\n", "\n" + " " * _WIDTH))
    sys.exit(facts["failure"] is not None)
