"""Canaries without servers: the order of scores and passes, the noise, the verdict, the checkpoint."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.numpy import load, save
from torch.distributed import HashStore

from r3train.host_group import join_ranks, leave_ranks
from r3train.ids import split_uids
from r3train.loop.canaries import Canaries, CANARY_FILE, NotServed
from r3train.proof.suspicion import Suspicions
from r3train.proof.writer import EvidenceWriter
from r3train.types import CanaryScores, RankTopology, ReplayEvidence, Scores
from tests.unit.config.test_config import config
from tests.unit.hf_model import facts

HF = facts(vocab_size=256)
CHECKED = {"use_rollout_routing_replay": True, "enable_r3_correctness_check": True}
UNREPLAYED = {"use_rollout_routing_replay": False, "enable_r3_correctness_check": False}
UNREPLAYED["check_weight_update_equal"] = True


def said(token_ids: np.ndarray, weights: float) -> tuple[np.ndarray, np.ndarray]:
    """The log-prob of each token after those before it, and the rows, that weights give a text."""
    before = np.concatenate([[0], np.cumsum(token_ids[:-1])])
    log_probs = -(1 + np.abs(np.sin(before * 0.37 + token_ids + weights))).astype(np.float32)
    log_probs[0] = 0
    first = (np.cumsum(token_ids)[:-1, None] + np.arange(4) + round(weights * 10)) % 8
    return log_probs, np.stack([first, (first + 3) % 8], axis=-1).astype(np.uint8)


class Actor:
    """An actor of one rank whose weights are a number."""

    def __init__(self):
        self.topology = RankTopology(moe_layer_numbers=((1, 2, 3, 4),))
        self.weights, self.texts, self.calls, self.own_routers = 0.0, {}, [], None

    def check_replay(self, on: bool) -> None:
        assert on

    def compute_log_probs(
        self, slices, replay_pass, temperature, weight_version=None, *, routing="replay"
    ):
        replays = slices[0].routes is not None
        passes = (("old_log_prob", "replay"), (None, "native"))
        assert (replay_pass, routing) in (passes if replays else ((None, "replay"),))
        assert temperature == 1.0
        found = {}
        for s in slices:
            out = np.zeros(s.num_rows, np.float32)
            texts, _ = split_uids(s.token_uids)
            for text in np.unique(texts[s.token_uids >= 0]):
                rows = np.flatnonzero((texts == text) & (s.token_uids >= 0))
                log_probs, own = said(s.tokens[rows], self.weights)
                out[rows[:-1]] = log_probs[1:]
                if not replays:
                    continue
                equal = (np.sort(own) == np.sort(s.routes[rows[:-1]])).all(-1)
                if routing == "replay":
                    self.calls.append((weight_version, s.microbatch_id, equal))
            found[s.microbatch_id] = torch.from_numpy(out)
        return found

    def collect_drift(self):
        return {}

    def collect_evidence(self, step):
        records = []
        for version, microbatch, equal in self.calls:
            assert version == step
            for layer in range(4):
                rows, same = len(equal), int(equal[:, layer].sum())
                zeros = dict.fromkeys((f for f in ReplayEvidence.__slots__ if f not in _OTHERS), 0)
                records.append(
                    ReplayEvidence(
                        **zeros,
                        step=step,
                        replay_pass="old_log_prob",
                        stream="routes",
                        stage="replay_forward",
                        layer_number=layer + 1,
                        num_rows=rows,
                        rows_replayed=rows,
                        topk=2,
                        rows_equal=same,
                        rows_overlap=rows - same,
                    )
                )
        self.calls.clear()
        return records


_OTHERS = {
    "step",
    "replay_pass",
    "stream",
    "stage",
    "layer_number",
    "num_rows",
    "rows_replayed",
    "topk",
}
_OTHERS |= {"rows_equal", "rows_overlap", "counts_tokens", "num_calls"}


class Fleet:
    """Two servers, each with weights and a prefix cache of its own."""

    def __init__(self, *, returns_routes: bool):
        self.weights, self.cached, self.asked = [0.0, 0.0], [{}, {}], []
        self.returns_routes = returns_routes
        self.seconds = 0.0  # that servers take for all canaries
        self.decodes_with: float | None = None  # other weights than those of a prefill
        self.rounds = lambda: 0.0  # weights are so much off in a call
        self.present = lambda: [0, 1]

    def canary_texts(self, count, longest):
        random = np.random.default_rng(0)
        return [random.integers(0, 256, longest).astype(np.int32) for _ in range(count)]

    def score_canaries(self, texts, keys, version, *, halves, drawn, at_once, servers=(0, 1)):
        self.asked.append((version, len(texts), at_once, keys[0], halves))
        assert len(set(keys)) == len(texts)
        places = [(*of, i < halves) for i, of in enumerate(zip(texts, keys))]
        scores = {s: [self.read(s, *place, drawn) for place in places] for s in servers}
        return lambda: (scores, self.seconds)

    def read(self, server, text, key, halved, drawn):
        half, old = len(text) // 2, self.cached[server].get(key)
        weights = self.weights[server] + self.rounds()
        log_probs, rows = said(text, weights)
        sampled = (text[-1] + 7 * np.arange(drawn, dtype=np.int32)) % 256
        whole, whole_rows = said(np.concatenate([text, sampled]), weights)
        if self.decodes_with is not None:
            decoded, _ = said(np.concatenate([text, sampled]), self.decodes_with)
            whole[len(text) :] = decoded[len(text) :]
        if not self.returns_routes:
            rows, whole_rows = rows[:, :0, :0], whole_rows[:, :0, :0]
        whole = Scores(whole, whole_rows, 0, sampled)
        if not halved:
            return CanaryScores(None, None, whole)
        late = np.concatenate([[np.float32(0)], log_probs[half + 1 :]])
        self.cached[server][key] = True
        early = Scores(late, rows, half if old else 0)
        return CanaryScores(early, Scores(late, rows, half), whole)

    def update(self, weights, flush=True):
        self.weights = [weights, weights]
        if flush:
            self.cached = [{}, {}]


@pytest.fixture
def one_rank():
    join_ranks("gloo", HashStore(), 0, 1, timeout=timedelta(seconds=60))
    yield
    leave_ranks()


class Run:
    def __init__(self, run_dir, resumed=None, **settings):
        # the first suspect update ends a run that is checked like this
        more = {"r3_suspect_limit": 1.0, "r3_canary_share": 1.0}
        settings = config(**CHECKED | more | settings)
        self.actor, self.run_dir, self.notes = Actor(), run_dir, []
        self.fleet = Fleet(returns_routes=settings.replay.use_rollout_routing_replay)
        display = SimpleNamespace(note=lambda text, **_: self.notes.append(text))
        self.canaries = Canaries(
            settings,
            HF,
            self.actor,
            [self.actor.topology],
            SimpleNamespace(weights=self.fleet, rollouts=self.fleet, display=display),
            EvidenceWriter(run_dir, 0, "now") if settings.r3_check_enabled else None,
            resumed=resumed,
        )

    def begin(self, version):
        self.canaries.ask_first(version)
        self.canaries.begin(version)

    def update(self, version, weights=None, spoil=lambda fleet: None, flush=True):
        self.actor.weights = version * 0.1 if weights is None else weights
        self.fleet.update(self.actor.weights, flush)
        spoil(self.fleet)
        self.canaries.send(version)
        self.canaries.wait()
        return self.canaries.judge(version)

    def lines(self):
        path = self.run_dir / "evidence" / "served.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def run(tmp_path, one_rank):
    run = Run(tmp_path)
    assert not run.canaries.ready
    run.begin(0)
    return run


def test_the_start_reads_8_texts_alone_twice_four_and_eight_at_once_and_updates_the_first_two(run):
    assert run.canaries.ready
    assert [asked[:3] for asked in run.fleet.asked] == [(0, 8, n) for n in (1, 1, 4, 8)]
    assert len({asked[3] for asked in run.fleet.asked}) == 4, "nothing is cached"
    metrics = run.update(1)
    assert metrics["served/passed"] and metrics["served/gap_max"] == metrics["served/suspect"] == 0
    assert run.fleet.asked[-1] == (1, 2, 1, run.fleet.asked[0][3], 1)
    assert [asked[4] for asked in run.fleet.asked] == [1] * 5
    (note,) = run.notes
    assert "2 texts, 992 tokens" in note and "100% of the (layer, expert) pairs" in note
    assert "repeat themselves bit by bit" in note


def test_the_verdict_of_a_step_is_that_of_its_weights(run):
    run.update(1)
    assert run.canaries.served(0).servers == run.canaries.served(1).servers == 2
    assert run.canaries.served(7) is None
    assert [(line["step"], line["server"]) for line in run.lines()] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]
    assert all(line["attempt"] == "now" for line in run.lines())


def stale(server, weights):
    def spoil(fleet):
        fleet.weights[server] = weights

    return spoil


@pytest.mark.parametrize(
    "test, how",
    [
        ("EARLY", dict(flush=False)),
        ("MOVED", dict(spoil=stale(1, 0.1))),
        ("MOVED", dict(spoil=stale(0, 0.0))),  # the start's
        ("BOUND", dict(spoil=lambda fleet: fleet.update(0.201))),
        ("ROUTER", dict(spoil=lambda fleet: fleet.update(0.26))),
        ("DECODED", dict(spoil=lambda fleet: setattr(fleet, "decodes_with", 0.0))),
    ],
)
def test_a_fault_ends_the_run_at_its_update_and_is_named(run, test, how):
    run.update(1)
    if test in ("BOUND", "ROUTER"):
        noise = run.canaries._noise
        # what the actor is compared with allows anything but what the test is about
        wide = dict(gap_mean=0.5, gap_max=9.0) if test == "ROUTER" else dict(rows_left=noise.rows)
        run.canaries._noise = replace(noise, **wide)
        run.canaries._suspicions = Suspicions(1.0)
    with pytest.raises(NotServed, match=f"^not served: {test}: server ") as error:
        run.update(2, **how)
    assert error.value.version == 2 and error.value.metrics["served/passed"] is False
    assert run.lines()[-1]["step"] == 2


@pytest.mark.parametrize(
    "test, how",
    [
        ("EARLY", dict(flush=False)),
        ("MOVED", dict(spoil=stale(1, 0.1))),
        ("BOUND", dict(spoil=lambda fleet: fleet.update(1.7))),
    ],
)
def test_without_replay_log_probs_alone_are_judged_and_nothing_is_written(
    test, how, tmp_path, one_rank
):
    run = Run(tmp_path, **UNREPLAYED)
    run.begin(0)
    assert "experts" not in run.notes[0] and "of the vocabulary" in run.notes[0]
    metrics = run.update(1)
    assert metrics["served/passed"] and metrics["served/router_left"] == 0
    with pytest.raises(NotServed, match=f"^not served: {test}: server "):
        run.update(2, **how)
    run.canaries.keep(tmp_path)
    assert list(tmp_path.iterdir()) == []  # a resumed run chooses them anew


def test_a_restarted_server_may_round_otherwise(run):
    run.update(1)
    run.canaries.restarted()
    metrics = run.update(1, spoil=lambda fleet: fleet.weights.__setitem__(1, 0.1 + 1e-7))
    assert metrics["served/passed"] and run.canaries.served(1).servers == 4
    assert all(e["version"] < line["step"] for line in run.lines() for e in line["earlier"])
    # weights that it had before are found by its bits
    with pytest.raises(NotServed, match="MOVED: server 1.* of version 0"):
        run.update(2, spoil=stale(1, 0.0))


def test_a_server_that_was_out_of_use_is_held_against_what_it_said_before(run):
    run.update(1)
    every = run.fleet.score_canaries

    def of_server_0(*args, **how):
        scores, seconds = every(*args, **how)()
        return lambda: ({0: scores[0]}, seconds)

    run.fleet.score_canaries = of_server_0
    run.update(2)
    assert len(run.canaries.last_scores) == 2
    run.fleet.score_canaries = every
    with pytest.raises(NotServed, match="MOVED: server 1, weight version 3: .* of version 1"):
        run.update(3, spoil=stale(1, 0.1))


def test_of_a_server_that_has_left_no_scores_stay(run):
    run.update(1)
    every = run.fleet.score_canaries
    run.fleet.present = lambda: [0]
    run.fleet.score_canaries = lambda *args, **how: every(*args, **how, servers=[0])
    run.update(2)
    assert [scores.server for scores, _ in run.canaries.last_scores] == [0]


@pytest.mark.parametrize("limit, tries", [(1.0, 1), (5.0, 5), (0.0, 0)])
def test_a_server_that_joins_is_refused_where_it_scores_otherwise_than_one_with_its_weights(
    limit, tries, tmp_path, one_rank
):
    run = Run(tmp_path, r3_suspect_limit=limit)
    run.canaries.score_joiner(1, 0, 0)
    assert not run.fleet.asked, "no noise is known"
    run.begin(0)
    run.fleet.asked.clear()
    run.canaries.score_joiner(1, 0, 0)
    assert len(run.fleet.asked) == min(tries, 1)
    run.fleet.asked.clear()
    run.fleet.weights[1] = 0.04  # whose experts are chosen as before
    with pytest.raises(ValueError) if limit else nullcontext():
        run.canaries.score_joiner(1, 0, 0)
    assert len({asked[3] for asked in run.fleet.asked}) == len(run.fleet.asked) == tries
    assert run.update(1)["served/passed"], "it ends no run"


def test_one_that_rounds_as_servers_did_at_the_start_joins(tmp_path, one_rank):
    run, random = Run(tmp_path, r3_suspect_limit=5.0), np.random.default_rng(0)
    run.fleet.rounds = lambda: random.normal(0, 0.02)
    run.begin(0)
    for _ in range(200):
        run.canaries.score_joiner(1, 0, 0)
    run.fleet.weights[1] = 0.4
    with pytest.raises(ValueError):
        run.canaries.score_joiner(1, 0, 0)


def test_an_update_that_moves_nothing_is_inconclusive(run):
    metrics = run.update(1, weights=0.0)
    assert metrics["served/passed"] and metrics["served/inconclusive"] == 2


def test_cached_keys_are_of_one_version_where_an_update_flushes_nothing(tmp_path, one_rank):
    run = Run(tmp_path, pause_generation_mode="in_place", max_weight_staleness=1)
    run.begin(0)
    assert run.update(1, flush=False)["served/passed"]
    assert run.fleet.asked[-1][3] != run.fleet.asked[0][3]
    assert run.update(1, flush=False)["served/passed"], "sent again, to a server that came back"


def test_a_start_may_ask_a_server_again_that_has_left_and_kept_its_cache(tmp_path, one_rank):
    run = Run(tmp_path, pause_generation_mode="in_place", max_weight_staleness=1)
    run.canaries.ask_first(0)
    run.begin(0)
    assert run.canaries.ready


def test_a_resumed_run_has_its_texts_and_first_readings_and_measures_its_own_machine(run, tmp_path):
    checkpoint, later = tmp_path / "checkpoint", tmp_path / "later"
    checkpoint.mkdir(), later.mkdir()
    run.update(1)
    run.canaries.keep(checkpoint)
    again = Run(later, resumed=checkpoint)
    assert not again.canaries.ready
    # this machine is 1e-4 nats off where the other was exact
    again.actor.weights = 0.1
    again.fleet.update(0.1001)
    again.begin(1)
    assert "another machine" in again.notes[-1]
    metrics = again.update(2, spoil=lambda fleet: fleet.update(0.2001))
    assert metrics["served/passed"] and metrics["served/suspect"] < 1
    for one, other in zip(run.canaries._texts, again.canaries._texts, strict=True):
        np.testing.assert_array_equal(one, other)
    third = Run(later, resumed=checkpoint)
    third.actor.weights = 0.2
    with pytest.raises(NotServed, match="MOVED: .* of version 0"):
        third.begin(2)  # its servers hold the first weights of all


@pytest.mark.parametrize("damage", [b"", b"x" * 100, "cut"])
def test_a_damaged_file_of_canaries_is_refused_by_name(run, tmp_path, damage):
    run.canaries.keep(tmp_path)
    path = tmp_path / CANARY_FILE
    path.write_bytes(path.read_bytes()[:-40] if damage == "cut" else damage)
    with pytest.raises(ValueError, match=f"{CANARY_FILE}: not a whole file of canaries"):
        Run(tmp_path, resumed=tmp_path)


def test_a_checkpoint_without_canaries_chooses_them_anew(tmp_path, one_rank):
    run = Run(tmp_path, resumed=tmp_path)
    assert not run.canaries.ready
    run.begin(0)
    assert run.canaries.ready


def test_a_large_budget_reads_more_texts(tmp_path, one_rank):
    run = Run(tmp_path, r3_canaries=16384)
    run.begin(0)
    run.update(1)
    assert [asked[1] for asked in run.fleet.asked] == [33] * 5


def test_short_contexts_and_small_budgets_make_shorter_texts(tmp_path, one_rank):
    for settings, longest in (
        ({}, 496),
        ({"r3_canaries": 64}, 32),
        ({"r3_canaries": 16384}, 496),
        ({"max_tokens_per_gpu": 100}, 92),
        ({"rollout_max_context_len": 90}, 74),
    ):
        assert Run(tmp_path, **settings).canaries._longest == longest


def test_the_first_updates_and_those_after_a_restart_are_judged_and_then_what_the_share_pays_for(
    tmp_path, one_rank
):
    run = Run(tmp_path, r3_canary_share=1e-6)
    run.fleet.seconds = 100.0
    run.begin(0)

    def judged(versions):
        return [version for version in versions if run.update(version)]

    assert judged(range(1, 8)) == [1, 2]
    run.canaries.restarted()
    assert judged(range(8, 14)) == [8, 9]
    assert run.canaries.served(12) is None
    every = Run(tmp_path / "every", r3_canary_share=1.0)
    every.fleet.seconds = 100.0
    every.begin(0)
    assert all(every.update(version) for version in range(1, 6))


def test_a_text_for_which_the_settings_leave_no_room_is_chosen_anew(run, tmp_path):
    run.canaries.keep(tmp_path)
    again = Run(tmp_path, resumed=tmp_path, max_tokens_per_gpu=100)
    again.begin(0)
    assert {len(text) for text in again.canaries._texts} == {92}
    assert again.update(1)["served/passed"]


def test_a_checkpoint_whose_canaries_drew_nothing_is_gone_on_from(run, tmp_path):
    run.canaries.keep(tmp_path)
    path = tmp_path / CANARY_FILE
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    tensors = {name: t for name, t in load(content).items() if not name.startswith("sampled")}
    for name in [name for name in tensors if name.startswith("actor")]:
        tensors[name] = np.ascontiguousarray(tensors[name][:-8])
    for name in [name for name in tensors if name.startswith("whole")]:
        tensors[name] = np.ascontiguousarray(tensors[name][:-8])
    path.write_bytes(save(tensors, header["__metadata__"]))
    again = Run(tmp_path / "again", resumed=tmp_path)
    again.actor.weights = 0.2
    with pytest.raises(NotServed, match="MOVED: .* of version 0"):
        again.begin(2)  # its servers hold the first weights of all
