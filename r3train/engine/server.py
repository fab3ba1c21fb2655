"""A SGLang server as a subprocess of the trainer; it dies with its owner."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, KW_ONLY
from importlib.util import find_spec
from pathlib import Path

import psutil

from r3train.child_environment import inherited
from r3train.config.files import load_json_object
from r3train.families import (
    cpu_attention_of,
    has_linear_attention,
    is_of_text_and_images,
    model_type_of,
)
from r3train.cuda_environment import set_nccl_defaults, visible_gpus
from r3train.engine.addresses import interface_of, is_loopback
from r3train.engine.backend import EngineDied, EngineError
from r3train.engine.flags import check_server_flags, server_fields
from r3train.engine.key import ENGINE_KEY_VARIABLE

# on_progress(elapsed_s, stage of the start)
OnProgress = Callable[[float, str], None]

PORTS = range(20000, 32000)
_LOG_TAIL_LINES = 30
_POLL_S = 0.25
_MOST_BYTES = 1 << 20  # of an answer about itself
# what SGLang 0.5.23 logs as a stage of its start begins, and the stage
_STAGES = {
    "Load weight begin": "loading weights",
    "Load weight end": "allocating the KV cache",
    "CUDA graph begin": "capturing CUDA graphs",
}
_STAGE = re.compile("|".join(_STAGES))
# Kernels of the experts on CUDA where routes are recorded.  SGLang's own choice records none for gpt-oss on
# Hopper and for most families on Blackwell (docs/run/gpus.md).  Triton's records them on every card.
_EXPERTS_BACKEND = "triton"


def free_port(host: str) -> int:
    """Find a TCP port on ``host`` that nobody listens on, below 32768.

    The server binds it seconds later.  By default the system gives ports from 32768 on to outgoing
    connections, which could take such a port in the meantime.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in random.SystemRandom().sample(PORTS, 100):
        with socket.socket(family) as sock, contextlib.suppress(OSError):
            sock.bind((host, port))
            return port
    raise OSError(f"{host}: 100 ports of {PORTS} were tried, and none can be bound")


def start_stage(path: Path, begin: int) -> str:
    """Return the stage of a server's start, in words, by its log from byte ``begin`` on; "" for none."""
    text, stage = log_tail(path, 1000, begin), ""
    if found := [*_STAGE.finditer(text)]:
        stage = next(words for key, words in _STAGES.items() if key in found[-1][0])
    return stage


def log_tail(path: Path, lines: int = _LOG_TAIL_LINES, begin: int = 0) -> str:
    """The last lines of a log file, from byte ``begin`` on, reading at most its last 64 KiB."""
    try:
        with open(path, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(begin, file.tell() - 65536))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])


def other_models(model: Path) -> str:
    """Return the files of SGLang's models without the class of ``model``, as ``afmoe,apertus,...``.

    Returns "" where the class is in none.  SGLang imports all 250 otherwise, for more than a second.
    """
    sglang, config = find_spec("sglang"), model / "config.json"
    if sglang is None or not config.is_file():
        return ""
    names = load_json_object(config).get("architectures") or ["-"]
    folder = Path(sglang.submodule_search_locations[0]) / "srt" / "models"
    texts = {file.stem: file.read_text(encoding="utf-8") for file in sorted(folder.glob("*.py"))}
    unused = [name for name, text in texts.items() if f"class {names[0]}(" not in text]
    return ",".join(unused) if len(unused) < len(texts) else ""


def server_flags(args: Mapping[str, object]) -> list[str]:
    """Server arguments as flags of a command line.

    Underscores become dashes; True is the bare flag, False and None leave it out; a list becomes
    one flag with several values.
    """
    flags: list[str] = []
    for key, value in args.items():
        name = "--" + key.lstrip("-").replace("_", "-")
        if value is None or value is False:
            continue
        flags.append(name)
        if value is True:
            continue
        if isinstance(value, (list, tuple)):
            flags.extend(str(item) for item in value)
        else:
            flags.append(str(value))
    return flags


@dataclass(eq=False)
class SGLangServer:
    """One SGLang server (``engine/launch_server.py``) and everything that it starts.

    ``server_args`` are SGLang's own flags (see ``server_flags``) and win over the defaults made
    here.  With ``exact_boundaries`` the token at a weight update in mid-generation has the right
    version, at the cost of SGLang's overlap of scheduling and computing.  ``device`` is ``"cpu"`` or ``"cuda"``; None asks torch.  With an ``api_key`` every
    request but ``/health`` must carry it.  ``env_names`` are variables of the environment that it gets
    besides the usual ones.  ``adapter_flags`` let it serve adapters (``engine.adapters``).  With
    ``return_indexer_topk`` it can say which tokens the indexers of sparse attention chose.  Raises
    ValueError for a host other than loopback without a key.  Not thread-safe, except ``check_alive``.
    """

    model_path: str | Path
    log_path: str | Path
    _: KW_ONLY
    dtype: str = "float32"
    server_args: Mapping[str, object] = field(default_factory=dict)
    return_routed_experts: bool = False
    return_indexer_topk: bool = False
    exact_boundaries: bool = True
    seed: int = 42
    start_timeout_s: float = 300.0
    on_progress: OnProgress | None = None
    host: str = "127.0.0.1"
    port: int | None = None  # None: a free one
    device: str | None = None
    api_key: str | None = None
    env_names: Collection[str] = ()
    adapter_flags: Mapping[str, object] | None = None

    def __post_init__(self) -> None:
        self.server_args = {
            name.lstrip("-").replace("-", "_"): value for name, value in self.server_args.items()
        }
        check_server_flags(
            self.server_args,
            replay=self.return_routed_experts,
            indexer=self.return_indexer_topk,
            adapters=self.adapter_flags is not None,
        )
        self.model_path, self.log_path = str(self.model_path), Path(self.log_path)
        self.port = self.port or free_port(self.host)
        if self.api_key is None and not is_loopback(self.host):
            raise ValueError(
                f"a server at {self.host} without a key: whoever reaches it could generate and replace"
                f" its weights; set {ENGINE_KEY_VARIABLE} to the same key here and where the trainer"
                " runs (openssl rand -hex 16 makes one), or bind it to 127.0.0.1"
            )
        self._guard: subprocess.Popen | None = None
        self._stopped = False

    @property
    def addr(self) -> str:
        """Address of the server: ``host:port``, as ``--rollout-external-engine-addrs`` takes it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def pid(self) -> int | None:
        """Process id of the guard; all processes of the server are its descendants."""
        return self._guard.pid if self._guard else None

    def command(self) -> list[str]:
        """The server's command line, without the guard."""
        device = self.device or ("cuda" if visible_gpus() else "cpu")
        model_type = model_type_of(Path(self.model_path))
        args: dict[str, object] = {
            "dtype": self.dtype,
            "random_seed": self.seed,
            "weight_version": "0",
            # The trainer owns the tokenizer; servers get tokens and return tokens.
            "skip_tokenizer_init": True,
            # With overlap the version label of the token at a weight update is off by one.
            "disable_overlap_schedule": self.exact_boundaries,
            "enable_return_routed_experts": self.return_routed_experts,
            "enable_return_indexer_topk": self.return_indexer_topk,
            "log_level_http": "warning",
        }
        if device == "cpu":
            args |= {
                "device": "cpu",
                "mem_fraction_static": 0.3,
                "max_total_tokens": 32768,
                "sleep_on_idle": True,  # without it an idle scheduler keeps a core busy
                "skip_server_warmup": True,  # /health generates a token too
            }
            if attention := cpu_attention_of(model_type):
                args["attention_backend"] = attention
            if has_linear_attention(model_type):
                # with overlap SGLang takes snapshots of states, which it has kernels for only
                args["disable_overlap_schedule"] = True
            if self.adapter_flags:
                args["lora_backend"] = "torch_native"  # cpu/sglang_lora.py has the rest
        elif self.return_routed_experts and not self._names_experts_backend():
            args["moe_runner_backend"] = _EXPERTS_BACKEND
        if is_of_text_and_images(model_type):
            # no vision tower and no processor of images, as of a checkpoint of text only; the flag
            # --language-model-only is for other architectures
            args["json_model_override_args"] = '{"language_model_only": true}'
        args |= self.server_args
        args |= self.adapter_flags or {}
        args |= {"model_path": self.model_path, "host": self.host, "port": self.port}
        return [sys.executable, "-m", "r3train.engine.launch_server", *server_flags(args)]

    def _names_experts_backend(self) -> bool:
        """True where the flags choose the experts' kernels, or a way between GPUs that has its own."""
        return not {"moe_runner_backend", "moe_a2a_backend"}.isdisjoint(
            server_fields(self.server_args)
        )

    def environment(self) -> dict[str, str]:
        """The part of the owner's environment that a server needs (``inherited``): offline, one thread on a CPU.

        On CUDA float32 is multiplied as float32.  It holds the key, and for gloo the network interface of
        the server's host, unless GLOO_SOCKET_IFNAME names one.
        """
        env = inherited(os.environ, self.env_names)
        # torch reads sources in the encoding of the locale
        env |= {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "PYTHONUTF8": "1"}
        set_nccl_defaults(env)  # as in the ranks, on the weight group's other side
        env.pop(ENGINE_KEY_VARIABLE, None)
        if self.api_key:
            env[ENGINE_KEY_VARIABLE] = self.api_key
        interface = None if is_loopback(self.host) else interface_of(self.host)
        if interface is not None:
            # gloo would choose the interface of the host name, which is loopback on many nodes
            env.setdefault("GLOO_SOCKET_IFNAME", interface)
        if (self.device or ("cuda" if visible_gpus() else "cpu")) == "cpu":
            env["OMP_NUM_THREADS"] = "1"
            # states of linear attention are bfloat16 otherwise, whatever the dtype
            env.setdefault("SGLANG_MAMBA_CONV_DTYPE", self.dtype)
            env.setdefault("SGLANG_DISABLED_MODEL_ARCHS", other_models(Path(self.model_path)))
        else:
            # SGLang puts the router's float32 of some families into TF32, whose mantissa has ten bits,
            # whatever its flag says; the actor multiplies in float32
            env.setdefault("NVIDIA_TF32_OVERRIDE", "0")
            if self.return_indexer_topk:
                # fused with what follows, an indexer's kernel gives places in page tables, not tokens
                env["SGLANG_DSA_FUSE_TOPK"] = "0"
                # unset it is index_topk; up to more, prefills attend to all tokens and record no choice
                env.pop("SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD", None)
        return env

    def start(self) -> SGLangServer:
        """Start the server under its guard; returns at once, ``wait_ready`` waits."""
        assert self._guard is None, "this server was started already"
        guard = [sys.executable, "-m", "r3train.engine.server_guard"]
        guard += ["--owner-pid", str(os.getpid()), "--"]
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log_path, "ab") as log:
            # None for a pipe, such as the output of r3train serve: it cannot be read again
            self._log_begin = log.tell() if log.seekable() else None
            self._guard = subprocess.Popen(
                guard + self.command(),
                stdin=subprocess.PIPE,  # its end of file tells the guard that the owner ended
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.environment(),
                start_new_session=True,  # Ctrl-C is the owner's to handle
            )
        return self

    def restart(self) -> SGLangServer:
        """End the server and start it again at the same address; see ``start``."""
        self.stop()
        self._guard, self._stopped = None, False
        return self.start()

    def check_alive(self) -> None:
        """Raise EngineDied, with exit code and log tail, once the server has ended by itself."""
        if self._guard is None or self._stopped:
            return
        code = self._guard.poll()
        if code is not None:
            raise EngineDied(
                f"the SGLang server {self.addr} ended with exit code {code}; "
                f"last lines of {self.log_path}:\n{log_tail(self.log_path)}"
            )

    def wait_ready(self) -> None:
        """Wait until ``/health`` answers 200.

        Raises EngineDied as soon as the process ends, EngineError after ``start_timeout_s``.
        """
        assert self._guard is not None, "start the server first"
        began = time.monotonic()
        while True:
            self.check_alive()
            elapsed = time.monotonic() - began
            if self.healthy():
                return
            if elapsed > self.start_timeout_s:
                raise EngineError(
                    f"the SGLang server {self.addr} was not ready after {elapsed:.0f} s "
                    f"(rollout_server_start_timeout_s {self.start_timeout_s:g}); "
                    f"last lines of {self.log_path}:\n{log_tail(self.log_path)}"
                )
            if self.on_progress is not None:
                begin = self._log_begin
                stage = "" if begin is None else start_stage(self.log_path, begin)
                self.on_progress(elapsed, stage)
            time.sleep(_POLL_S)

    def healthy(self, timeout_s: float = 5.0) -> bool:
        """True when ``/health`` answers 200 within the time; SGLang generates a token for it."""
        try:
            return self._get("/health", timeout_s)[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    def is_busy(self) -> bool:
        """True while requests are in flight; False also where the server does not say."""
        try:
            loads = json.loads(self._get("/v1/loads?include=core", 5.0)[1])["loads"]
            return any(load["num_running_reqs"] or load["num_waiting_reqs"] for load in loads)
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError):
            return False

    def _get(self, path: str, timeout_s: float) -> tuple[int, bytes]:
        """The status and the body of an answer; raises OSError and HTTPException."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)
        try:
            headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read(_MOST_BYTES)
        finally:
            connection.close()

    def stop(self) -> None:
        """End the server and everything it started; returns when nothing is left. Idempotent."""
        guard, self._stopped = self._guard, True
        if guard is None:
            return
        try:
            tree = psutil.Process(guard.pid).children(recursive=True)
        except psutil.Error:
            tree = []
        if guard.stdin is not None and not guard.stdin.closed:
            guard.stdin.close()
        try:
            guard.wait(timeout=15)
        except subprocess.TimeoutExpired:
            guard.kill()
            guard.wait()
        for process in tree:  # finds nothing unless the guard was killed
            try:
                process.kill()
            except psutil.Error:
                continue
        psutil.wait_procs(tree, timeout=5)

    def __enter__(self) -> SGLangServer:
        self.start()
        try:
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_exc: object) -> None:
        self.stop()
