"""Command-line flags, made from the sections of the configuration."""

from __future__ import annotations

import os
import re
import signal
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, get_args, get_origin

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from r3train.config.help_text import (
    OVERRIDES,
    gist,
    heading,
    metavar,
    most_used,
    rows_of,
    section_rows,
    sections,
    without_none,
)
from r3train.config.peers import ANSWERS, PEERS, removed
from r3train.config.recipes import recipe_names
from r3train.config.run import RunConfig
from r3train.config.sources import (
    ALIASES,
    FILE_FIELD,
    closest,
    flag_name,
    misspelt,
    Place,
    nearest,
    places,
    printable,
)

SERVER_PREFIX = "--sglang-"
# our own flags that start with --sglang- (names from slime)
OUR_SERVER_FLAGS = ("--sglang-server-concurrency",)
# within it a rank that fails for the same reason is ended by torchrun
_RANK_0_SPEAKS_S = 10.0
PROMPT_FILES = "--prompt-data"
_ALL = "--help-all"
_FURTHER = "A Megatron setting without a flag goes through --transformer-override NAME=VALUE or --optimizer-override,"
_FURTHER += " an SGLang one through --sglang-FLAG"
_HELP = ("--help", "-h", _ALL)


class SettingType(click.ParamType):
    """The value of a flag, read as its field's type; ``none`` unsets an optional field."""

    def __init__(self, annotation: Any) -> None:
        self.optional, self.kind = without_none(annotation)
        self.choices = get_args(self.kind) if get_origin(self.kind) is Literal else ()
        self.name = metavar(self.kind)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        if self.optional and value.lower() == "none":
            return None
        if self.choices:
            if value not in self.choices:
                self.fail(
                    f"{value!r} is not one of {', '.join(self.choices)}."
                    f"{nearest(value, self.choices, 0.6)}"
                )
            return value
        if self.kind in (int, float):
            try:
                return self.kind(value)
            except ValueError:
                self.fail(f"{value!r} is not {'an integer' if self.kind is int else 'a number'}.")
        return value

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return the choices that begin so, or leave it to the shell to name files."""
        if self.name == "PATH":
            return [CompletionItem(incomplete, type="file")]
        return [CompletionItem(each) for each in self.choices if each.startswith(incomplete)]


class ListOption(click.Option):
    """A flag with several values: repeated, separated by spaces, or separated by commas."""


class TrainCommand(click.Command):
    """A click command with a flag for each field of RunConfig, and help by section."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        args = [word for word in args if word != "--"]  # flags may stand after it
        ctx.meta["words"] = tuple(args)
        if not ctx.resilient_parsing:
            _answer_help(self, ctx, args)
        try:
            ctx.meta["sglang"], rest = _take_server_flags([_dashed(word) for word in args])
            files = [word for word in rest if word == "--config" or word.startswith("--config=")]
            if len(files) > 1:
                raise click.UsageError(
                    "--config is given twice: a run has one file; give what differs as flags", ctx
                )
            if not ctx.resilient_parsing:
                self._refuse_unknown(ctx, rest)
            return super().parse_args(ctx, _spread_lists(self, rest))
        except click.UsageError as error:
            if error.message.startswith("Got unexpected extra argument"):
                error.message += self._stray(
                    rest, error.message.partition("(")[2].split()[0].rstrip(")")
                )
            _let_rank_0_speak()
            raise

    def _refuse_unknown(self, ctx: click.Context, args: list[str]) -> None:
        """Raise UsageError for flags that are not here, all at once, with the wrong values of those that are."""
        params = {flag: each for each in self.params for flag in (*each.opts, *each.secondary_opts)}
        flags_by_answer: dict[str, list[str]] = {}
        problems, words, in_list = [], iter(args), False
        for word in words:
            flag, equals, value = word.partition("=")
            param = params.get(flag)
            if param is None and re.fullmatch(r"--[a-z][\w-]*", flag):
                names = [each[2:] for each in params]
                near = closest(flag[2:], names, 0.8).replace("mean ", "mean '--").replace("?", "'?")
                name = flag[2:].replace("-", "_")
                answer = removed(flag, ctx.info_name or "") or ANSWERS.get(name)
                answer = answer or near or misspelt(name)
                flags_by_answer.setdefault(answer.strip(), []).append(f"'{flag}'")
            elif param is None and not in_list and re.fullmatch(r"-[a-z][\w-]+", flag):
                problems.append(f"{flag}: flags begin with two dashes: -{flag}")
            elif param is not None and not param.is_flag and not isinstance(param, ListOption):
                try:
                    param.type.convert(value if equals else next(words, None), param, ctx)
                except click.BadParameter as error:
                    problems.append(f"Invalid value for '{flag}': {error.message}")
            if flag.startswith("--"):
                in_list = param is None or isinstance(param, ListOption)
        lines = [f"No such option {', '.join(f)}. {a}" for a, f in flags_by_answer.items()]
        if "" in flags_by_answer:
            lines.append(_FURTHER)
        if lines or any("two dashes" in problem for problem in problems):
            raise click.UsageError("\n".join(map(str.strip, [*lines, *problems])), ctx)

    def _stray(self, args: list[str], word: str) -> str:
        """Return what is meant by a word that no flag takes: the value of a switch, or NAME=VALUE."""
        name, equals, value = word.partition("=")
        if equals:
            name, known = name.lstrip("+"), places(RunConfig)
            short = name.rpartition(".")[2]
            here = PEERS.get(name) or (short if short in known else PEERS.get(short, ""))
            if here in known:
                return f": flags are --name value: {flag_name(here)} {value}"
            also = f" Here it is {here}." if here else nearest(short, known)
            return f": flags are --name value.{also}"
        before = args[args.index(word) - 1] if word in args[1:] else ""
        switches = (param for param in self.params if param.is_flag)
        if any(before in (*param.opts, *param.secondary_opts) for param in switches):
            off = f"--no-{before[2:].removeprefix('no-')}"
            return f": {before} is a switch and takes no value; {off} turns it off"
        return ""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the settings that most runs give, one section (``--help SECTION``), or all sections."""
        topic = ctx.meta.get("help")
        rows = [("--config RECIPE", "TOML file, or a name of r3train recipes; flags win over it.")]
        rows += [param.get_help_record(ctx) for param in self.params if param.help]
        if topic is None:
            rows = [(usage, gist(text)) for usage, text in rows]
            _write_group(formatter, "Most used", [*rows, *most_used()])
            _write_group(
                formatter, "Sections (--help SECTION, such as --help lora)", section_rows()
            )
            more = [
                ("--help-all", "Every setting."),
                ("r3train explain NAME", "All about one setting."),
            ]
            _write_group(formatter, "More", more)
            return
        if topic == _ALL:
            _write_group(formatter, "General", [*rows, ("--help [SECTION]", "Show help and exit.")])
        for section in sections() if topic == _ALL else [topic]:
            _write_group(formatter, heading(section), rows_of(section))


def train_options(function: Callable[..., Any], more: Sequence[click.Option] = ()) -> TrainCommand:
    """Turn a function of one argument, ``config: RunConfig``, into a command with all flags.

    more: further options, with a help text: the function gets their values by name.
    Use it instead of ``click.command``.  The command merges the --config file, the flags and the
    environment.  A wrong value ends it with exit code 2 and a readable message.
    """

    @click.pass_context
    def command(ctx: click.Context, config_file: str | None, **values: Any) -> Any:
        further = {option.name: values.pop(option.name) for option in more}
        given = {
            name: value
            for name, value in values.items()
            if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
        }
        for table, flag in OVERRIDES.items():
            texts = given.pop(flag[2:].replace("-", "_"), ())
            if texts:
                with usage_errors():
                    given[table] = dict(_assignment(text, flag) for text in texts)
        if ctx.meta["sglang"]:
            given["sglang"] = ctx.meta["sglang"]
        with usage_errors():
            config = RunConfig.from_sources(file=config_file, flags=given, environ=os.environ)
        return function(config, **further)

    config_option = click.Option(
        ["--config", "config_file"], metavar="RECIPE", shell_complete=_complete_recipe
    )
    options = [config_option, *(_option(place) for place in places(RunConfig).values())]
    return TrainCommand(
        name=function.__name__.replace("_", "-"),
        callback=command,
        help=function.__doc__,
        params=[option for option in (*options, *more) if option is not None],
        context_settings={"max_content_width": 100},
    )


def _complete_recipe(
    _ctx: click.Context, _param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    found = [CompletionItem(name) for name in recipe_names() if name.startswith(incomplete)]
    return [CompletionItem(incomplete, type="file"), *found]


def parse_train_flags(flags: Sequence[str], *, prog_name: str) -> RunConfig:
    """Return the configuration that train_async.py would make of these flags.

    Raises click's UsageError for a wrong flag, and click's Exit after ``--help``.
    """
    found: list[RunConfig] = []
    train_options(found.append).main(list(flags), prog_name=prog_name, standalone_mode=False)
    if not found:
        raise click.exceptions.Exit(0)
    return found[0]


@contextmanager
def usage_errors() -> Iterator[None]:
    """Turn a ValueError into click's message and exit code 2, on one rank of each node."""
    try:
        yield
    except ValueError as error:
        _let_rank_0_speak()
        raise click.UsageError(printable(str(error))) from error


def _let_rank_0_speak() -> None:
    """Wait on a node's other ranks: its first has found the same, and torchrun then ends them.

    An error of one rank alone is shown after the wait.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # slurm/ranks.sh lets it be ignored
        time.sleep(_RANK_0_SPEAKS_S)


def _option(place: Place) -> click.Option | None:
    """Return the click option of a field; None for one whose flags are not known here, or has none."""
    if place.name in ("sglang", FILE_FIELD):
        return None
    if place.name in OVERRIDES:
        return ListOption([OVERRIDES[place.name]], multiple=True, metavar="NAME=VALUE")
    _, kind = without_none(place.info.annotation)
    flags = [
        place.flag,
        *(flag_name(alias) for alias, name in ALIASES.items() if name == place.name),
    ]
    if kind is bool:
        return click.Option([f"{flag}/--no-{flag[2:]}" for flag in flags], default=None)
    if get_origin(kind) is tuple:
        return ListOption(flags, multiple=True, type=SettingType(get_args(kind)[0]))
    return click.Option(flags, type=SettingType(place.info.annotation), default=None)


def _answer_help(command: TrainCommand, ctx: click.Context, args: Sequence[str]) -> None:
    """Show what --help asks for and exit; return where it is not given.  Raises UsageError for no section."""
    asking = [number for number, word in enumerate(args) if word.partition("=")[0] in _HELP]
    if not asking:
        return
    word, equals, section = args[asking[0]].partition("=")
    after = args[asking[0] + 1 :][:1]
    if not equals and after and not after[0].startswith("-"):
        section = after[0]
    if word == _ALL or not section:
        ctx.meta["help"] = _ALL if word == _ALL else None
        click.echo(ctx.get_help())
    elif section in sections():
        ctx.meta["help"] = section
        formatter = ctx.make_formatter()
        command.format_options(ctx, formatter)
        click.echo(formatter.getvalue().strip("\n"))
    else:
        raise click.UsageError(
            f"--help {section}: no such section.{closest(section, sections())} There are"
            f" {', '.join(sections())}; r3train explain {section} looks for a setting",
            ctx,
        )
    ctx.exit()


def _write_group(formatter: click.HelpFormatter, title: str, rows: list[tuple[str, str]]) -> None:
    with formatter.section(title):
        formatter.write_dl([(usage, text.strip()) for usage, text in rows], col_max=34)


def _value(text: str) -> Any:
    """Read a value as TOML does (1, 0.5, true, [1, 2]); any other text stays text."""
    if text in ("True", "False"):
        return text == "True"
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _assignment(text: str, flag: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip().isidentifier():
        raise ValueError(f"{flag}: expected NAME=VALUE, got {text!r}")
    return name.strip(), _value(value.strip())


def _flags_of(
    args: Sequence[str], is_taken: Callable[[str], bool]
) -> Iterator[tuple[str, list[str] | None]]:
    """Yield the flags that are taken with their values, and every other word with None.

    The values are that of ``--flag=value``, or all words up to the next flag.
    """
    words = list(args)
    while words:
        word = words.pop(0)
        flag, equals, value = word.partition("=")
        if not is_taken(flag):
            yield word, None
            continue
        values = [value] if equals else []
        while not equals and words and not words[0].startswith("--"):
            values.append(words.pop(0))
        yield flag, values


def _take_server_flags(args: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Split words into --sglang-* flags with their values, and the rest."""
    taken: dict[str, Any] = {}
    rest: list[str] = []
    ours = (SERVER_PREFIX, *OUR_SERVER_FLAGS)
    for flag, values in _flags_of(args, lambda f: f.startswith(SERVER_PREFIX) and f not in ours):
        if values is None:
            rest.append(flag)
            continue
        name = flag.removeprefix(SERVER_PREFIX).replace("-", "_")
        if name in taken:
            raise click.UsageError(f"{flag} is given twice")
        read = [_value(text) for text in values]
        taken[name] = True if not read else read[0] if len(read) == 1 else read
    return taken, rest


def _dashed(word: str) -> str:
    """Return a flag with dashes for underscores; any other word as it is."""
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value if word.startswith("--") else word


def _spread_lists(command: click.Command, args: list[str]) -> list[str]:
    """Rewrite ``--list a b,c`` as ``--list a --list b --list c``, which click understands.

    Of ``--prompt-data``, which once took one file, the last counts.
    """
    lists = {
        flag for param in command.params if isinstance(param, ListOption) for flag in param.opts
    }
    spread: list[str] = []
    given: list[str] = []
    for flag, values in _flags_of(args, lists.__contains__):
        if values is None:
            spread.append(flag)
            continue
        if flag not in (*OVERRIDES.values(), PROMPT_FILES):  # values may contain commas
            values = [part for value in values for part in value.split(",") if part]
        if not values:
            raise click.UsageError(f"{flag} needs at least one value")
        if flag == PROMPT_FILES:  # as a flag of one value: the last one counts
            given = values
            continue
        for part in values:
            spread += [flag, part]
    # first: a flag at the end that lacks its value must not take this one's
    return [word for part in given for word in (PROMPT_FILES, part)] + spread
