"""WEIGHTS: what servers hold after an update, live and from the records."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from tests.unit.evidence_dirs import audit_of_one_start, write_run

from r3train.audit.audit_run import audit_run
from r3train.loop.server_checksums import SentSum
from r3train.proof.weights_verdict import weights_records, WeightsHistory, WeightsRecord
from r3train.proof.writer import EvidenceWriter, WEIGHTS_FILE

NAMES = [f"rank {rank} model.layers.{layer}.weight" for rank in (0, 1) for layer in range(4)]
LAYOUTS = ["tp 2", "tp 2", "fp8"]


def held(version: int, **changed: int) -> dict[str, str]:
    """Checksums of a server that holds a version; changed: tensors, by their number, of another one."""
    return {name: f"{changed.get(f't{i}', version):04x}{i:04x}" for i, name in enumerate(NAMES)}


def update(
    version: int,
    servers: dict[int, dict[str, str]],
    sent: str | None = None,
    count: int = 8,
    compared: int = 0,
    others: Sequence[list[str]] = (),
) -> list[WeightsRecord]:
    """Records of an update; others: by server what it held otherwise than a second export of ``compared`` tensors."""
    sum_and_count = f"{version + 7:016x}" if sent is None else sent, count
    return weights_records(version, sum_and_count, servers, LAYOUTS, compared, others)


def start(history: WeightsHistory, **servers) -> list[str]:
    return history.judge(update(0, servers.get("servers", {0: held(0), 1: held(0)}), "", 0))


def kinds(lines: list[str]) -> list[str]:
    return [line.split(":")[0] for line in lines]


def test_sound_updates_are_nothing():
    history = WeightsHistory()
    assert start(history) == []
    for version in range(1, 5):
        assert history.judge(update(version, {0: held(version), 1: held(version)})) == []


def test_SAME_names_the_server_that_holds_an_earlier_version_and_which():
    history = WeightsHistory()
    start(history)
    for version in (1, 2):
        history.judge(update(version, {0: held(version), 1: held(version)}))
    lines = history.judge(update(3, {0: held(3), 1: held(1)}))
    assert kinds(lines) == ["SAME", "UNLIKE"]
    assert lines[0].startswith(
        "SAME: server 1, weight version 3: it holds all 8 tensors of weight version 1"
    )


def test_SAME_finds_the_only_server_of_a_run():
    history = WeightsHistory()
    history.judge(update(1, {0: held(1)}))
    assert kinds(history.judge(update(2, {0: held(1)}))) == ["SAME"]


def test_RESTART_names_a_server_that_holds_what_it_was_started_with():
    history = WeightsHistory()
    start(history)
    history.judge(update(1, {0: held(1), 1: held(1)}))
    lines = history.judge(update(2, {0: held(2), 1: held(0)}))
    assert kinds(lines) == ["RESTART", "UNLIKE"] and "server 1, weight version 2" in lines[0]


def test_UNLIKE_names_the_tensors_that_one_server_kept():
    history = WeightsHistory()
    history.judge(update(1, {0: held(1), 1: held(1)}))
    (line,) = history.judge(update(2, {0: held(2), 1: held(2, t3=1, t6=1)}))
    assert line.startswith(
        f"UNLIKE: server 1, weight version 2: {NAMES[3]}, {NAMES[6]} are not those of server 0"
    )


def test_UNLIKE_names_a_tensor_that_one_server_lacks():
    fewer = {name: value for name, value in held(1).items() if name != NAMES[3]}
    for first, second in ((held(1), fewer), (fewer, held(1))):
        (line,) = WeightsHistory().judge(update(1, {0: first, 1: second}))
        assert f": {NAMES[3]} are not those of server 0" in line


def test_servers_of_another_layout_hold_other_tensors_rightly():
    history = WeightsHistory()
    other = {name: f"{i:08x}" for i, name in enumerate(NAMES)}
    assert history.judge(update(1, {0: held(1), 2: other})) == []


def test_what_rounding_hides_is_no_fault():
    """An update of which servers store the same values, a version that is sent again, and another set of tensors."""
    history = WeightsHistory()
    start(history)
    assert history.judge(update(1, {0: held(0), 1: held(0)}, sent="ab")) == []
    assert history.judge(update(2, {0: held(0), 1: held(0)}, sent="ab")) == []
    # with LoRA a first update sends all tensors, and later ones those with adapters
    assert history.judge(update(3, {0: held(0), 1: held(0)}, sent="cd", count=4)) == []
    assert history.judge(update(4, {0: held(4), 1: held(4)}, sent="ef", count=4)) == []
    again = update(5, {0: held(4), 1: held(4)}, sent="01", count=4)
    assert kinds(history.judge(again)) == ["SAME"] * 2


def test_a_new_server_is_judged_by_what_it_held_itself():
    history = WeightsHistory()
    history.judge(update(1, {0: held(1)}))
    assert history.judge(update(2, {0: held(2), 1: held(2)})) == []


def test_SENT_names_the_tensors_of_the_server_that_held_others_than_were_sent():
    history = WeightsHistory()
    start(history)
    both = {0: held(1), 1: held(1)}
    assert history.judge(update(1, both, compared=5, others=[[], []])) == []
    both = {0: held(2), 1: held(2)}
    (line,) = history.judge(update(2, both, compared=5, others=[[], NAMES[2:4]]))
    assert line.startswith(f"SENT: server 1, weight version 2: {NAMES[2]}, {NAMES[3]} are not")


def test_SENT_fails_an_update_that_was_not_compared_where_others_were():
    history = WeightsHistory()
    start(history)
    history.judge(update(1, {0: held(1)}, compared=5))
    assert kinds(history.judge(update(2, {0: held(2)}))) == ["SENT"]


# -- what was sent ---------------------------------------------------------------------------------


def summed(tensors: dict[str, torch.Tensor], dtype=torch.float32) -> tuple[str, int]:
    total = SentSum(dtype)
    assert list(total.over(iter(tensors.items()))) == list(tensors.items())
    return total.result()


def test_the_sum_of_what_is_sent_tells_one_bit_and_two_tensors_that_changed_places():
    some = {"a": torch.randn(3, 5), "b": torch.randn(3, 5)}
    bit = {**some, "b": torch.nextafter(some["b"], torch.tensor(9.0))}
    swapped = {"a": some["b"], "b": some["a"]}
    assert len({summed(of) for of in (some, bit, swapped)}) == 3
    assert summed(some) == summed({name: tensor.clone() for name, tensor in some.items()})
    assert summed(some)[1] == 2


def test_the_sum_is_of_the_values_that_servers_store():
    some = {"a": torch.full((4,), 1.0)}
    hidden = {"a": torch.full((4,), 1.0 + 1e-4)}
    assert summed(some) != summed(hidden)
    assert summed(some, torch.bfloat16) == summed(hidden, torch.bfloat16)


def test_tensors_that_do_not_lie_in_order_are_summed_by_their_values():
    whole = torch.randn(4, 6)
    assert summed({"a": whole.t()}) == summed({"a": whole.t().contiguous()})


# -- from the files --------------------------------------------------------------------------------


def with_weights(run, *updates):
    writer = EvidenceWriter(run, 0, "2026-01-01T00:00:00Z")
    for records in updates:
        writer.write_weights(records)
    writer.close()
    path = run / "evidence" / "steps.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line, records in zip(lines, updates):
        line["held"] = len(records)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


SOUND = [update(v, {0: held(v), 1: held(v)}, "" if v == 0 else None) for v in range(3)]


def found(run) -> list[str]:
    return [f"{f.step} {f.what.split(':')[0]}" for f in audit_of_one_start(run).findings]


def test_a_sound_run_passes(tmp_path):
    assert found(with_weights(write_run(tmp_path), *SOUND)) == []


@pytest.mark.parametrize(
    "server, changes, expected",
    [
        (1, {"held": SOUND[1][1].held}, ["2 SAME", "2 UNLIKE"]),
        (0, {"held": SOUND[0][0].held}, ["2 RESTART", "2 UNLIKE"]),
        (1, {"held": "ab"}, ["2 UNLIKE"]),
        (1, {"compared": 3, "other": NAMES[:1]}, ["2 SENT"]),
    ],
)
def test_a_fault_that_the_records_show_fails_the_claim(tmp_path, server, changes, expected):
    records = list(SOUND[2])
    records[server] = replace(records[server], **changes)
    assert found(with_weights(write_run(tmp_path), *SOUND[:2], records)) == expected


def test_a_record_that_is_gone_and_a_file_that_is_gone_fail_the_claim(tmp_path):
    run = with_weights(write_run(tmp_path), *SOUND)
    path = run / "evidence" / WEIGHTS_FILE
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]))
    assert found(run) == [f"2 servers in {WEIGHTS_FILE}"]
    path.unlink()
    assert found(run) == [f"{step} servers in {WEIGHTS_FILE}" for step in range(3)]


def test_a_fault_of_a_start_that_a_later_one_made_good_names_the_start_and_can_be_accepted(
    tmp_path,
):
    wrong = [SOUND[2][0], replace(SOUND[2][1], held="ab")]
    run = write_run(tmp_path / "run")
    first = EvidenceWriter(run, 0, "2025-12-31T00:00:00Z")
    first.write_weights(wrong)
    first.close()
    (finding,) = audit_run(with_weights(run, *SOUND)).findings
    assert finding.where() == "start 2025-12-31T00:00:00Z, step 2"
    audit = audit_run(run, accept_superseded=True)
    assert audit.verdict == "passed" and "UNLIKE" in " ".join(audit.notes)
