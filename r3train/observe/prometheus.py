"""The last step's numbers as Prometheus text on the loopback interface: ``--metrics-port``.

Names are those of metric_table.py after ``r3train:``, as vLLM and SGLang have theirs after ``vllm:`` and
``sglang:``, with whole words for units and ``_total`` after a count that only grows:

>>> exported_name("perf/step_s"), exported_name("rollout/generation_s_max")
('r3train:perf_step_seconds', 'r3train:rollout_generation_seconds_max')
>>> exported_name("perf/host_memory_gb"), exported_name("perf/tokens_per_s")
('r3train:perf_host_memory_bytes', 'r3train:perf_tokens_per_second')
"""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from r3train.observe.metric_table import row_of

_HOST = "127.0.0.1"
_PREFIX = "r3train:"
# a step's count -> the count of all steps since the start
_SUMMED = {
    "step": "steps",
    "rollout/tokens": "generation_tokens",
    "rollout/num_samples": "samples",
    "train/num_loss_tokens": "loss_tokens",
}
_MOST_CONNECTIONS = 32
_FAULTS, _EVAL = "faults/", "eval/"


class PrometheusSink:
    """A server of the last step's numbers, and of each set's last evaluation.

    port: 0 takes a free one.  silent_s: a connection, which holds a thread, ends where nothing comes for so long; of many
    at once the oldest end.  Raises ValueError where it cannot be listened on.
    """

    def __init__(self, port: int, silent_s: float = 10.0) -> None:
        self._step: dict[str, float] = {}
        self._evaluations: dict[str, float] = {}
        self._sums = dict.fromkeys(_SUMMED, 0.0)
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(port, _HOST, registry)
        except OSError as error:
            raise ValueError(f"--metrics-port {port}: {_HOST}: {error.strerror}") from None
        handler = self._server.RequestHandlerClass
        self._server.RequestHandlerClass = type("Request", (handler,), {"timeout": silent_s})
        self._server.process_request_thread = self._answer
        self._connections: dict[socket.socket, None] = {}  # the oldest first
        self._server.handle_error = lambda *_: None  # a client that left, or says nothing
        self.url = f"http://{_HOST}:{self._server.server_port}/metrics"

    def _answer(self, connection: socket.socket, address: Any) -> None:
        """Answer on the connection's own thread."""
        self._connections[connection] = None
        for oldest in list(self._connections)[:-_MOST_CONNECTIONS]:
            with contextlib.suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)
        try:
            type(self._server).process_request_thread(self._server, connection, address)
        finally:
            del self._connections[connection]

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Serve these numbers from now on, in place of those of the step before."""
        if all(key.startswith(_EVAL) for key in numbers):
            self._evaluations = {**self._evaluations, **numbers}
            return
        counts = {**numbers, "step": 1.0}
        self._sums = {key: value + counts.get(key, 0.0) for key, value in self._sums.items()}
        self._step = {"step": step, **numbers}

    def write_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Take no samples: there are numbers only."""

    def close(self, failed: bool) -> None:
        """End the server."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def collect(self) -> Iterator[Metric]:
        """Yield each metric, as prometheus_client asks for them."""
        for key, name in _SUMMED.items():
            about = f"{_about(key)}; of all steps since the start"
            yield CounterMetricFamily(f"{_PREFIX}{name}", about, self._sums[key])
        for key, value in self._step.items():
            family = CounterMetricFamily if key.startswith(_FAULTS) else GaugeMetricFamily
            yield family(exported_name(key), _about(key), _in_base_unit(key, value))
        families: dict[str, Metric] = {}
        for key, value in self._evaluations.items():
            _, set_name, number = key.split("/", 2)
            name = exported_name(f"{_EVAL}{number}")
            if name not in families:
                families[name] = GaugeMetricFamily(name, _about(key), labels=["name"])
            families[name].add_metric([set_name], value)
        yield from families.values()


def exported_name(key: str) -> str:
    """Return the name of a metric's key; a count's lacks its ``_total``."""
    name = re.sub(r"[^a-zA-Z0-9]+", "_", key)
    unit = _unit(key)
    if unit == "GB":
        name = re.sub("_gb$", "_bytes", name)
    elif unit == "s" or unit.endswith("/s"):
        name = re.sub("(?<=_per)_s(?=_|$)", "_second", name)
        name = re.sub("_s(?=_|$)", "_seconds", name)
    return f"{_PREFIX}{name}"


def _in_base_unit(key: str, value: float) -> float:
    return round(value * 1e9) if _unit(key) == "GB" else value


def _unit(key: str) -> str:
    row = row_of(key)
    return "" if row is None else row.unit


def _about(key: str) -> str:
    row = row_of(key)
    return f"{key}: {row.meaning}" if row is not None else key
