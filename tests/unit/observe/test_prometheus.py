"""The numbers of a run at --metrics-port, as a Prometheus server reads them."""

from __future__ import annotations

import math
import socket
import threading
import time
import urllib.error
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from r3train.observe.metric_table import METRICS
from r3train.observe.metrics import MetricsWriter
from r3train.observe.prometheus import exported_name, PrometheusSink


def scraped(url: str) -> dict[str, float]:
    """All samples by name, with the value of a label after it."""
    with urllib.request.urlopen(url, timeout=30) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        samples = [sample for family in families for sample in family.samples]
    found = {" ".join([sample.name, *sample.labels.values()]): sample.value for sample in samples}
    assert len(found) == len(samples), "a name is there twice"
    return found


def test_the_numbers_of_the_last_step_and_of_each_sets_last_evaluation_are_served(tmp_path):
    sink = PrometheusSink(0)
    none = {"r3train:steps_total", "r3train:generation_tokens_total", "r3train:samples_total"}
    none.add("r3train:loss_tokens_total")
    with MetricsWriter(tmp_path, tensorboard=False, sinks=[sink]) as writer:
        assert scraped(sink.url) == dict.fromkeys(none, 0.0)
        for step, tokens in ((7, 10), (8, 32)):
            values = {"rollout/tokens": tokens, "rollout/num_samples": 4, "perf/step_s": step / 2}
            values |= {"r3/passed": True, "perf/host_memory_gb": 2.5, "train/loss": math.nan}
            values |= {"faults/bad_answers": 3, "recheck/passed": None, "train/my-loss": 0.5}
            writer.write(step, values | ({"train/num_loss_tokens": 9} if step == 7 else {}))
        for version, mean in ((0, 0.25), (8, 0.5)):
            numbers = {"mean": mean, "pass_at_4": 0.75}
            writer.write_evaluation(version, "held-out", "f", [], numbers)
        writer.write_evaluation(0, "other", "f", [], {"mean": 0.125})
        found = scraped(sink.url)
        assert math.isnan(found.pop("r3train:train_loss"))
        assert found == {
            "r3train:steps_total": 2,
            "r3train:generation_tokens_total": 42,
            "r3train:samples_total": 8,
            "r3train:loss_tokens_total": 9,
            "r3train:step": 8,
            "r3train:rollout_tokens": 32,
            "r3train:rollout_num_samples": 4,
            "r3train:perf_step_seconds": 4.0,
            "r3train:perf_host_memory_bytes": 2.5e9,
            "r3train:r3_passed": 1,
            "r3train:faults_bad_answers_total": 3,
            "r3train:train_my_loss": 0.5,
            "r3train:eval_mean held-out": 0.5,
            "r3train:eval_pass_at_4 held-out": 0.75,
            "r3train:eval_mean other": 0.125,
        }
    with pytest.raises(urllib.error.URLError):
        scraped(sink.url)


def test_it_listens_on_the_loopback_interface_alone():
    sink = PrometheusSink(0)
    try:
        port = int(sink.url.split(":")[2].split("/")[0])
        addresses = {line.split()[1] for line in open("/proc/net/tcp") if line.split()[3] == "0A"}
        assert [a for a in addresses if a.endswith(f":{port:04X}")] == [f"0100007F:{port:04X}"]
        with pytest.raises(ValueError, match=f"--metrics-port {port}: 127.0.0.1: Address already"):
            PrometheusSink(port)
    finally:
        sink.close(False)
    with socket.create_server(("127.0.0.1", port)):
        pass  # free again


def test_a_connection_on_which_nothing_comes_is_closed_without_a_word(capfd):
    sink = PrometheusSink(0, silent_s=0.2)
    port, threads = int(sink.url.split(":")[2].split("/")[0]), threading.active_count()
    silent = [socket.create_connection(("127.0.0.1", port), timeout=30) for _ in range(20)]
    try:
        silent[0].sendall(b"GET /metr")
        assert [one.recv(1) for one in silent] == [b""] * 20
        while threading.active_count() > threads:
            time.sleep(0.01)
        assert scraped(sink.url)["r3train:steps_total"] == 0
    finally:
        for one in silent:
            one.close()
        sink.close(False)
    assert capfd.readouterr() == ("", "")


def test_of_many_connections_the_oldest_end_and_the_numbers_are_served():
    sink = PrometheusSink(0, silent_s=3600.0)
    port, threads = int(sink.url.split(":")[2].split("/")[0]), threading.active_count()
    silent = [socket.create_connection(("127.0.0.1", port), timeout=30) for _ in range(100)]
    try:
        assert [one.recv(1) for one in silent[:68]] == [b""] * 68
        assert scraped(sink.url)["r3train:steps_total"] == 0
        while threading.active_count() > threads + 32:
            time.sleep(0.01)
    finally:
        for one in silent:
            one.close()
        sink.close(False)


def test_every_metric_has_a_name_of_its_own():
    keys = [metric.key for rows in METRICS.values() for metric in rows]
    names = [exported_name(key) for key in keys]
    assert len(set(names)) == len(names)
    assert not [n for n in names if n.endswith(("_s", "_gb"))]
