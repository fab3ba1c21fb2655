"""``r3train launch``: start a run on several machines over ssh, and end it as one.

On each host of ``--hosts`` it starts ``r3train train`` with its number, in the same directory and by the same
Python; on those of ``--serve-hosts`` before that ``r3train serve``.  The far end is ``on_host``.  Rank 0's host
prints as it is, the name of any other stands before its lines.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import shlex
import shutil
import signal
import sys
from collections.abc import Sequence
from typing import BinaryIO

import click

from r3train.config import RunConfig
from r3train.config.options import train_options, usage_errors
from r3train.engine.key import ENGINE_KEY_VARIABLE, engine_api_key
from r3train.launch.on_host import ANSWER, facts
from r3train.launch.start_ranks import FORWARDED, MEETING_PORT, without

_SSH = (
    "ssh",
    "-T",
    "-o",
    "BatchMode=yes",
    "-o",
    "ConnectTimeout=10",
    "-o",
    "ServerAliveInterval=15",
)
_ANSWER_S = 60.0  # for ssh, and for Python to start there
_SPEAK_S = 20.0  # for the hosts that are left to say what they have seen, then to end
_SERVING = re.compile(rb"serving .* at (\S+)")  # the line of r3train serve
_LOST = 255  # ssh's own exit code
_ADDRESSES = "--rollout-external-engine-addrs"
_OPTIONS = (
    click.Option(
        ["--hosts"],
        required=True,
        metavar="HOST[:N],...",
        help="Hosts that train, as ssh takes them; rank 0 is on the first.  N: ranks on each (--nproc-per-node).",
    ),
    click.Option(
        ["--serve-hosts"],
        metavar="HOST[:N],...",
        help="Hosts that run N SGLang servers each; 1 unless it is given.  Their key is made for this start.",
    ),
    click.Option(
        ["--rdzv-endpoint"],
        metavar="HOST[:PORT]",
        help=f"Where the ranks meet: the first host, as all reach it.  [default: its name, port {MEETING_PORT}]",
    ),
    click.Option(
        ["--env"],
        multiple=True,
        metavar="NAME",
        help="Variable of this environment that the hosts get too; repeatable.  No other is carried.",
    ),
)


def _launch(
    config: RunConfig,
    hosts: str,
    serve_hosts: str | None,
    rdzv_endpoint: str | None,
    env: Sequence[str],
) -> None:
    """Train on several machines over ssh; the flags are those of ``r3train train``.

    Every host needs this directory, this Python and this r3train under the same names, and lets ssh in without a
    question.  --dry-run asks the hosts, prints their commands and starts nothing.  The exit code is that of the
    first host that failed.
    """
    context = click.get_current_context()
    words = [word for word in without(_OPTIONS, context.meta["words"]) if word != "--dry-run"]
    recipe = context.params["config_file"]
    with usage_errors():
        if shutil.which("ssh") is None:
            raise ValueError("ssh: no such program on PATH")
        environment = {name: _variable(name) for name in env}
        train = _training(_hosts(hosts, "--hosts"), rdzv_endpoint, words)
        serve = _serving(_hosts(serve_hosts, "--serve-hosts"), words) if serve_hosts else []
        if serve:
            key = engine_api_key(os.environ) or secrets.token_hex(16)
            environment[ENGINE_KEY_VARIABLE] = key
        asked = {"directory": os.getcwd(), "recipe": recipe}
        code = asyncio.run(_run(train, serve, environment, asked, config.run.dry_run))
    sys.exit(code)


launch_command = train_options(_launch, _OPTIONS)


def _variable(name: str) -> str:
    if name not in os.environ:
        raise ValueError(f"--env {name}: no such environment variable here")
    return os.environ[name]


def _hosts(text: str, flag: str) -> list[tuple[str, int | None]]:
    """Return the hosts of a flag with their numbers, None where none is given; raises ValueError."""
    found: list[tuple[str, int | None]] = []
    for part in text.split(","):
        host, colon, number = part.strip().partition(":")
        if not host or host.startswith("-") or colon and not (number.isdecimal() and int(number)):
            raise ValueError(f"{flag}: expected HOST or HOST:N, got {part!r}")
        if host in (name for name, _ in found):
            raise ValueError(f"{flag}: {host} is named twice")
        found.append((host, int(number) if colon else None))
    return found


def _training(
    hosts: list[tuple[str, int | None]], endpoint: str | None, words: Sequence[str]
) -> list[_Command]:
    """Return the commands of the hosts that train; raises ValueError for unequal numbers of ranks."""
    ranks = {number for _, number in hosts}
    if len(ranks) > 1:
        raise ValueError("--hosts: every host has the same number of ranks; name it at all of them")
    (number,) = ranks
    flags = [] if number is None else ["--nproc-per-node", str(number)]
    if len(hosts) > 1:
        meet = endpoint or _address(hosts[0][0])
        flags += ["--nnodes", str(len(hosts)), "--rdzv-endpoint", meet]
    commands = []
    for rank, (host, _) in enumerate(hosts):
        mine = ["--node-rank", str(rank)] if rank else []
        commands.append(_Command(host, host if rank else "", ["train", *flags, *mine, *words]))
    return commands


def _serving(hosts: list[tuple[str, int | None]], words: Sequence[str]) -> list[_Command]:
    """Return the commands of the servers; raises ValueError where the flags name others."""
    if any(word.partition("=")[0].replace("_", "-") == _ADDRESSES for word in words):
        raise ValueError(
            f"--serve-hosts starts the servers that {_ADDRESSES} would name: give one of both"
        )
    commands: list[_Command] = []
    for host, number in hosts:
        for local in range(number or 1):
            place = [
                "--host",
                _address(host),
                "--index",
                str(len(commands)),
                "--local-index",
                str(local),
            ]
            label = host if number in (None, 1) else f"{host} server {local}"
            commands.append(_Command(host, label, ["serve", *place, *words]))
    return commands


def _address(host: str) -> str:
    return host.rpartition("@")[2]


class _Failed(Exception):
    """A command has ended that should not have: its exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class _Command:
    """A command on a host, over one connection; ``label`` stands before its lines."""

    def __init__(self, host: str, label: str, words: list[str]) -> None:
        self.host, self.words, self.started = host, words, False
        self.ended: asyncio.Task[int] | None = None  # its exit code
        self._prefix = f"{label}: ".encode() if label else b""
        self._held: list[bytes] = []  # what was printed before it has started
        self._heard = asyncio.Event()  # the answer, or a server's address
        self._answer: bytes | None = None
        self._address: str | None = None

    async def ask(self, asked: dict[str, str | None], expected: dict[str, str]) -> str | None:
        """Connect, and return a line about what is not as it is here; None if all is."""
        far = shlex.join([sys.executable, "-P", "-m", "r3train.launch.on_host"])
        pipe = asyncio.subprocess.PIPE
        # a session of its own: Ctrl-C is for the run, not for the connection
        self._ssh = await asyncio.create_subprocess_exec(
            *_SSH, self.host, far, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
        )
        self.ended = asyncio.create_task(self._end())
        self._say(json.dumps(asked))
        await self._wait_for_word(_ANSWER_S)
        if self._answer is None:
            lines = b" / ".join(self._held).decode(errors="replace")
            return f"{self.host}: {lines or f'no answer in {_ANSWER_S:g} s'}"
        found = json.loads(self._answer)
        if isinstance(found, str):
            return f"{self.host}: {found}"
        for name, here in expected.items():
            if found[name] != here:
                return f"{self.host}: {name} is {found[name]}, here it is {here}"
        return None

    def start(self, environment: dict[str, str], *more: str) -> None:
        """Start the command, with further words."""
        self.started = True
        self._heard.clear()
        self._say(json.dumps({"command": [*self.words, *more], "environment": environment}))

    async def address(self) -> str:
        """Return a server's address once it answers; raises _Failed where it has ended before."""
        await self._wait_for_word()
        if self._address is None:
            raise _Failed(self.failed())
        return self._address

    def failed(self) -> int:
        """Say that the command has ended, and return the code with which the run ends."""
        code = self.ended.result()
        lost = code == _LOST or code < 0
        text = (
            "the connection is lost" if lost else f"r3train {self.words[0]} has ended with {code}"
        )
        click.echo(f"{self.host}: {text}: ending the others", err=True)
        return 1 if lost else code or 1

    def signal(self, name: str) -> None:
        """Send a signal to the command; one that has not started is left."""
        if self.started:
            self._say(name)
        else:
            self.leave()

    def leave(self) -> None:
        """End the connection."""
        if self.ended is not None and not self.ended.done():
            self._ssh.stdin.close()

    async def _wait_for_word(self, timeout: float | None = None) -> None:
        """Wait until ``_heard`` or the end, at most ``timeout`` seconds."""
        heard = asyncio.create_task(self._heard.wait())
        try:
            await asyncio.wait(
                {heard, self.ended}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            heard.cancel()

    def _say(self, line: str) -> None:
        if not self._ssh.stdin.is_closing():
            self._ssh.stdin.write(line.encode() + b"\n")

    async def _end(self) -> int:
        shown = (
            self._show(self._ssh.stdout, sys.stdout.buffer),
            self._show(self._ssh.stderr, sys.stderr.buffer),
        )
        await asyncio.gather(*shown)
        return await self._ssh.wait()

    async def _show(self, stream: asyncio.StreamReader, out: BinaryIO) -> None:
        rest = b""
        while chunk := await stream.read(1 << 16):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self._line(line, out)
            out.flush()
        if rest:
            self._line(rest, out)
            out.flush()

    def _line(self, line: bytes, out: BinaryIO) -> None:
        if not self.started:
            if line.startswith(ANSWER):
                self._answer = line.removeprefix(ANSWER)
                self._heard.set()
            elif line.strip():
                self._held.append(line.strip())
            return
        if found := _SERVING.fullmatch(line):
            self._address = found[1].decode()
            self._heard.set()
        out.write(self._prefix + line + b"\n")


async def _run(
    train: list[_Command],
    serve: list[_Command],
    environment: dict[str, str],
    asked: dict[str, str | None],
    dry_run: bool,
) -> int:
    """Ask all hosts, start their commands, and return the run's exit code once all have ended.

    Raises ValueError with a line for each host that cannot take part.
    """
    loop, task, received = asyncio.get_running_loop(), asyncio.current_task(), []

    def on_signal(number: signal.Signals) -> None:
        received.append(number)
        if not train[0].started:
            task.cancel()
        for command in train:
            command.signal(number.name)

    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # nohup
    for number in FORWARDED:
        if not (number == signal.SIGHUP and ignored):
            loop.add_signal_handler(number, on_signal, number)
    try:
        expected = facts(**asked)
        faults = await asyncio.gather(*(c.ask(asked, expected) for c in (*serve, *train)))
        if lines := sorted({fault for fault in faults if fault is not None}):
            raise ValueError("\n".join(lines))
        if dry_run:
            for command in (*serve, *train):
                click.echo(f"{command.host}: r3train {shlex.join(command.words)}")
            return 0
        for command in serve:
            command.start(environment)
        addresses = [await command.address() for command in serve]
        for command in train:
            command.start(environment, *(w for address in addresses for w in (_ADDRESSES, address)))
        return await _wait(train, serve)
    except asyncio.CancelledError:
        click.echo(f"stopped by {received[0].name} before the first step", err=True)
        return 128 + received[0]
    except _Failed as error:
        return error.code
    finally:
        await _end(train + serve)


async def _wait(train: list[_Command], serve: list[_Command]) -> int:
    """Wait until all that train have ended; returns 0, or the first failure's exit code."""
    left = {command.ended: command for command in (*train, *serve)}
    while any(command in train for command in left.values()):
        done, _ = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
        for ended in done:
            command = left.pop(ended)
            if ended.result() or command in serve:
                code = command.failed()
                await _settled(train, _SPEAK_S)
                return code
    return 0


async def _end(commands: list[_Command]) -> None:
    """End all that still run: by SIGTERM, and by SIGKILL what has not ended then."""
    for name in ("SIGTERM", "SIGKILL"):
        for command in commands:
            command.signal(name)
        await _settled(commands, _SPEAK_S)
    for command in commands:
        command.leave()


async def _settled(commands: list[_Command], seconds: float) -> None:
    running = [c.ended for c in commands if c.ended is not None and not c.ended.done()]
    if running:
        await asyncio.wait(running, timeout=seconds)
