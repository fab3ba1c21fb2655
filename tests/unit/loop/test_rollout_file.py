"""Samples on disk: all of a sample comes back, and nothing of a file that is not whole."""

from __future__ import annotations

import errno
import json
import resource
from dataclasses import fields, replace
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save

from r3train.config import RunConfig
from r3train.launch.job import resume
from r3train.config.checkpoint_settings import CheckpointSection
from r3train.config.rollout_settings import RolloutSection
from r3train.generation.buffer import GroupBuffer, ProducerState
from r3train.loop import replay_source, rollout_file
from r3train.loop.run_state import BUFFER_FILE
from r3train.loop.rollout_file import holds_field, read_samples, write_samples
from r3train.trainer.megatron.saved_state import LATEST, STATE
from r3train.types import Prompt, RolloutSample


def sample(sample_id: int, prompt: Prompt, response: int, routes: bool = True) -> RolloutSample:
    rng = np.random.default_rng(sample_id)
    n = len(prompt.token_ids) + response
    kept = rng.integers(0, 5, n).astype(np.int32)
    return RolloutSample(
        sample_id=sample_id,
        group_id=sample_id // 2,
        prompt=prompt,
        token_ids=rng.integers(0, 99, n).astype(np.int32),
        prompt_len=len(prompt.token_ids),
        loss_mask=rng.random(n) > 0.5,
        rollout_log_probs=-rng.random(n).astype(np.float32),
        routed_experts=rng.integers(0, 8, (n - 1, 3, 2)).astype(np.uint8) if routes else None,
        weight_versions=rng.integers(-1, 4, n).astype(np.int32),
        finish_reason="stop",
        text=f"säge {sample_id}",
        row_classes=rng.integers(0, 5, n).astype(np.uint8) if routes else None,
        mask_counts=kept if routes else None,
        mask_ids=rng.integers(0, 99, kept.sum()).astype(np.int32) if routes else None,
        # rows of its own width, and none at all
        indexer_topk=(
            rng.integers(0, 99, (sample_id, 3, 1 + sample_id), np.uint64) if routes else None
        ),
    )


def scored(routes: bool = True) -> list:
    prompts = [
        Prompt(f"p{i}", i, "text", np.arange(1 + i, dtype=np.int32), ["a"], {"k": i})
        for i in range(2)
    ]
    return [(sample(i, prompts[i // 2], 1 + i, routes), 0.1 * i) for i in range(4)]


def assert_equal(a: object, b: object) -> None:
    for f in fields(a):
        x, y = getattr(a, f.name), getattr(b, f.name)
        if f.name == "prompt":
            assert_equal(x, y)
        elif isinstance(x, np.ndarray):
            assert x.dtype == y.dtype and np.array_equal(x, y), f.name
        else:
            assert x == y, f.name


@pytest.mark.parametrize("routes", [True, False])
def test_every_field_of_every_sample_comes_back(tmp_path, routes):
    path = tmp_path / "s.safetensors"
    write_samples(path, scored(routes), {"rollout_id": 3})
    back, facts = read_samples(path)
    assert facts == {"rollout_id": 3}
    for (a, reward), (b, again) in zip(scored(routes), back, strict=True):
        assert_equal(a, b)
        assert reward == again
    assert back[0][0].prompt is back[1][0].prompt


def test_no_sample_at_all_is_a_file_too(tmp_path):
    write_samples(tmp_path / "s.safetensors", [], {"next": 1})
    assert read_samples(tmp_path / "s.safetensors") == ([], {"next": 1})


def test_the_arrays_take_their_own_bytes_and_little_more(tmp_path):
    path = tmp_path / "s.safetensors"
    write_samples(path, scored(), {})
    tokens = sum(s.num_tokens for s, _ in scored())
    words = sum(s.indexer_topk.size for s, _ in scored())
    # int32 tokens and versions, float32 log-probs, a mask, 3 * 2 experts
    assert path.stat().st_size < tokens * (4 + 4 + 4 + 1 + 6) + 8 * words + 5000


def one_byte_changed(content: bytes) -> bytes:
    return content[:-3] + bytes([content[-3] ^ 1]) + content[-2:]


@pytest.mark.parametrize(
    "damage, message",
    [
        *(
            (lambda content, n=n: content[: max(0, len(content) - n)], "not a whole file")
            for n in (1, 100, 5000)
        ),
        (one_byte_changed, "checksum"),
    ],
)
def test_a_damaged_file_is_refused_by_name(tmp_path, damage, message):
    path = tmp_path / "s.safetensors"
    write_samples(path, scored(), {})
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=f"s.safetensors: .*{message}"):
        read_samples(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match="none.safetensors: cannot read"):
        read_samples(tmp_path / "none.safetensors")


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "s.safetensors"
    write_samples(path, scored(), {"old": True})

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(rollout_file.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_samples(path, scored(), {"old": False})
    assert read_samples(path)[1] == {"old": True}
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_does_not_fit_is_an_os_error_with_its_name_and_leaves_the_old_one(tmp_path):
    path = tmp_path / "s.safetensors"
    write_samples(path, scored(), {"old": True})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size // 2, hard))
    try:
        with pytest.raises(OSError) as error:
            write_samples(path, scored(), {"old": False})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (error.value.errno, error.value.filename) == (errno.EFBIG, str(path))
    assert read_samples(path)[1] == {"old": True}
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_is_for_those_whom_the_umask_lets_read_it(tmp_path):
    path, plain = tmp_path / "s.safetensors", tmp_path / "plain"
    plain.touch()
    write_samples(path, scored(), {})
    assert path.stat().st_mode == plain.stat().st_mode


def groups() -> list:
    four = scored()
    return [four[:2], four[2:]]


def source(directory, **options):
    defaults = {
        "needs_routes": True,
        "num_groups": 2,
        "group_size": 2,
        "temperature": 1.0,
        "vocab_size": 1000,
    }
    options = defaults | options
    return replay_source.DumpedRollouts(directory, **options)


def test_a_dumped_rollout_is_replayed_in_its_groups(tmp_path):
    replay_source.dump_rollout(tmp_path, 5, groups())
    back = source(tmp_path).next_batch(5)
    assert [[s.sample_id for s, _ in group] for group in back] == [[0, 1], [2, 3]]


def test_a_replay_refuses_what_it_cannot_train_on(tmp_path):
    replay_source.dump_rollout(tmp_path, 0, groups())
    with pytest.raises(ValueError, match="rollout_0000001"):
        source(tmp_path).next_batch(1)
    with pytest.raises(ValueError, match="rollout_batch_size 3"):
        source(tmp_path, num_groups=3).next_batch(0)
    replay_source.dump_rollout(tmp_path, 0, [scored(routes=False)[:2], scored(routes=False)[2:]])
    with pytest.raises(ValueError, match="sample 0 has no routed_experts"):
        source(tmp_path).next_batch(0)
    replay_source.rollout_path(tmp_path, 0).rename(replay_source.rollout_path(tmp_path, 1))
    with pytest.raises(ValueError, match="does not hold rollout 1"):
        source(tmp_path).next_batch(1)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda s: s.token_ids.__setitem__(1, 1000), "token 1 is 1000, expected 0 to 999"),
        (lambda s: s.token_ids.__setitem__(0, -1), "token 0 is -1, expected 0 to 999"),
        (lambda s: s.rollout_log_probs.__setitem__(1, 0.5), "log-prob 1 is 0.5, expected a number"),
        (lambda s: s.rollout_log_probs.__setitem__(1, np.nan), "log-prob 1 is nan"),
        (
            lambda s: s.mask_ids.__setitem__(0, 1000),
            "sampling mask: token 0 is 1000, expected 0 to 999",
        ),
    ],
)
def test_a_dumped_sample_that_no_model_drew_is_refused_by_name(tmp_path, change, message):
    spoiled = groups()
    change(spoiled[1][1][0])
    replay_source.dump_rollout(tmp_path, 0, spoiled)
    with pytest.raises(ValueError, match=f"rollout_0000000.*: sample 3 cannot be .*: {message}"):
        source(tmp_path).next_batch(0)


def test_a_waiting_sample_that_no_model_drew_is_left_out_by_name_and_its_place_generated_again(
    tmp_path, caplog
):
    """Of an episode of several turns all are left out; other samples of the group are kept."""
    four = scored()
    four[0][0].token_ids[1] = 1_000_000
    four[2][0].rollout_log_probs[0] = 1e30
    facts = {
        "next_step": 0,
        "next_group": 2,
        "lines_from": 1,
        "groups": [
            {"group_id": 0, "prompt_id": "p0", "attempt": 0, "places": [[0, 1], [1, 1]]},
            {"group_id": 1, "prompt_id": "p1", "attempt": 2, "places": [[0, 2]]},
        ],
    }
    write_samples(tmp_path / BUFFER_FILE, four, facts)
    samples, left = resume.ResumePoint(tmp_path, start_rollout_id=0).buffer(99)
    assert [s.sample_id for s, _ in samples] == [1]
    assert [group["places"] for group in left["groups"]] == [[[1, 1]], []]
    assert {**left, "groups": 0} == {**facts, "groups": 0}
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2 and str(tmp_path / BUFFER_FILE) in told[0]
    assert (
        "sample 0 (prompt 'p0') is not trained, and generated again: token 1 is 1000000" in told[0]
    )
    assert "sample 2 (prompt 'p1')" in told[1] and "log-prob 0 is 1e+30" in told[1]
    # generation takes the rest, and makes what is missing
    section = RolloutSection(
        num_rollout=1, rollout_batch_size=2, n_samples_per_prompt=2, rollout_max_response_len=9
    )
    prompts = [Prompt(f"p{i}", i, "", np.arange(1, dtype=np.int32), None) for i in range(2)]
    buffer = GroupBuffer(section, prompts.__getitem__)
    missing = buffer.restore(ProducerState(samples, left))
    assert [(group.group_id, sorted(group.samples)) for group in missing] == [(0, [1]), (1, [])]


class Generated:
    """A source of one rollout, as servers would generate it."""

    def __init__(self, groups):
        self.groups = groups

    def next_batch(self, rollout_id, on_wait=None):
        return self.groups

    def stats(self):
        return {"generated_tokens": 7}

    def snapshot(self):
        return "kept"

    def put_back(self):
        pass


def injecting(directory, generated, *, start=0, least=0.9, temperature=1.0):
    section = CheckpointSection(
        ci_inject_rollout_data_path=directory,
        ci_inject_rollout_data_start_rollout_id=start,
        ci_inject_rollout_data_min_match_ratio=least,
    )
    return replay_source.InjectedRollouts(
        Generated(generated), section, needs_routes=True, temperature=temperature
    )


def with_tokens(groups, change):
    """The groups with other tokens in every response."""

    def changed(sample):
        tokens = sample.token_ids.copy()
        change(tokens[sample.prompt_len :])
        return replace(sample, token_ids=tokens)

    return [[(changed(s), reward) for s, reward in group] for group in groups]


def test_a_recording_takes_the_place_of_rollouts_that_are_like_it(tmp_path):
    replay_source.dump_rollout(tmp_path, 1, with_tokens(groups(), lambda t: None))
    other = [[(s, reward + 1) for s, reward in group] for group in groups()]
    source = injecting(tmp_path, other, start=1)
    assert source.next_batch(0) is other and source.stats()["inject_match"] is None
    back = source.next_batch(1)
    assert [[r for _, r in group] for group in back] == [[r for _, r in g] for g in groups()]
    assert source.stats() == {"generated_tokens": 7, "inject_match": 1.0}
    assert source.snapshot() == "kept"


def test_rollouts_unlike_the_recording_are_refused_with_its_file(tmp_path):
    replay_source.dump_rollout(tmp_path, 0, groups())

    def half(tokens):
        tokens[: len(tokens) // 2] += 1

    drifted = with_tokens(groups(), half)
    injecting(tmp_path, drifted, least=0.3).next_batch(0)
    with pytest.raises(
        ValueError, match=r"rollout_0000000.*generated again, expected at least 90.0%"
    ):
        injecting(tmp_path, drifted).next_batch(0)
    with pytest.raises(ValueError, match="rollout_0000000.*holds 4 samples, generated were 2"):
        injecting(tmp_path, groups()[:1]).next_batch(0)

    def other_prompt(sample):
        tokens = sample.token_ids.copy()
        tokens[0] += 1
        return replace(sample, token_ids=tokens)

    asked = [[(other_prompt(s), reward) for s, reward in group] for group in groups()]
    with pytest.raises(ValueError, match="sample 0 has another prompt"):
        injecting(tmp_path, asked).next_batch(0)
    replay_source.dump_rollout(tmp_path, 0, [scored(routes=False)[:2], scored(routes=False)[2:]])
    with pytest.raises(ValueError, match="rollout_0000000.*sample 0 has no routed_experts"):
        injecting(tmp_path, groups()).next_batch(0)


def turn_by_turn() -> list:
    """Two groups of two episodes each, of two turns and of one."""
    steps = []
    for (one, reward), episode, last in zip(scored(), (0, 0, 1, 1), (False, True) * 2):
        steps.append((replace(one, trajectory_id=episode, is_last_step=last), reward))
    more = [
        (replace(s, sample_id=s.sample_id + 4, trajectory_id=s.trajectory_id + 2), r)
        for s, r in steps
    ]
    return [steps, more[:2] + [(replace(more[2][0], is_last_step=True), 0.2)]]


def test_a_replay_counts_episodes_and_not_their_turns(tmp_path):
    replay_source.dump_rollout(tmp_path, 0, turn_by_turn())
    back = source(tmp_path).next_batch(0)
    assert [len(group) for group in back] == [4, 3]
    assert [[s.trajectory_id for s, _ in group] for group in back] == [[0, 0, 1, 1], [2, 2, 3]]
    with pytest.raises(ValueError, match=r"2 groups of \[2\] episodes.*n_samples_per_prompt 4"):
        source(tmp_path, group_size=4).next_batch(0)
    with pytest.raises(ValueError, match="one sample a turn.*global_batch_size asks for 2"):
        source(tmp_path, steps_per_rollout=2).next_batch(0)


@pytest.fixture
def resumed(tmp_path, monkeypatch):
    """A function that resumes with some settings at a checkpoint whose buffer holds some samples."""
    facts = dict.fromkeys(["prompt_data_sha256", "lora"])
    monkeypatch.setattr(resume, "run_facts", lambda _: facts)
    path = tmp_path / "iter_0000005"
    path.mkdir()
    state = {"num_rollouts": 5, "weight_version": 5, "topology": {"world_size": 1}, "run": facts}
    (path / STATE).write_text(json.dumps(state))
    (tmp_path / LATEST).write_text("5")

    def start(samples, **settings):
        write_samples(path / BUFFER_FILE, samples, {})
        config = RunConfig.from_toml("configs/tiny_cpu.toml", settings | {"load": tmp_path})
        job = SimpleNamespace(config=config, prompt_file=None)
        return resume.resume_point(job).start_rollout_id

    return start


@pytest.mark.parametrize("kept, other", [(True, -1), (False, 20)])
def test_a_run_with_other_sampling_mask_than_its_waiting_samples_does_not_resume(
    resumed, kept, other
):
    with pytest.raises(
        ValueError, match=f"{BUFFER_FILE}: .*, and --rollout-top-k is {other}: resume"
    ):
        resumed(scored(kept), rollout_top_k=other)
    assert resumed(scored(kept), rollout_top_k=20 if kept else -1) == 5
    assert resumed([], rollout_top_k=other) == 5


def test_a_run_with_a_served_teacher_does_not_resume_with_samples_that_it_has_not_seen(resumed):
    taught = {"use_opd": True, "opd_type": "sglang", "opd_teacher_url": "h:1"}
    bare = scored(routes=False)
    seen = [(replace(s, teacher_log_probs=np.zeros(s.num_tokens, np.float32)), r) for s, r in bare]
    with pytest.raises(ValueError, match=f"{BUFFER_FILE}: .* without a teacher's log-probs"):
        resumed(bare, **taught)
    assert resumed(bare) == resumed(seen) == resumed(seen, **taught) == resumed([], **taught) == 5


def test_a_run_that_compares_rewards_by_their_parts_does_not_resume_with_samples_without(resumed):
    by_parts = {"advantage_estimator": "gdpo", "reward_keys": ["a", "b"]}
    bare = scored(routes=False)
    parted = [(replace(s, reward_parts=(0.5, 1.0)), r) for s, r in bare]
    for waiting in (bare, parted[:1] + bare[1:]):
        with pytest.raises(
            ValueError, match=f"{BUFFER_FILE}: .* without the parts of their rewards"
        ):
            resumed(waiting, **by_parts)
    assert resumed(bare) == resumed(parted, **by_parts) == resumed([], **by_parts) == 5


def test_a_run_whose_ranks_hold_the_teacher_resumes_with_samples_that_no_server_has_taught(resumed):
    held = {"use_opd": True, "opd_type": "megatron", "opd_teacher_load": "teacher"}
    assert resumed(scored(routes=False), **held) == 5


def test_any_bit_of_the_header_counts_and_an_old_file_is_read(tmp_path):
    """A header says texts, labels and the next group: a bit of it once skipped a prompt for ever."""
    path = tmp_path / "s.safetensors"
    write_samples(path, scored(), {"next_group": 176})
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    expected = read_samples(path)
    for at in range(8, end, 5):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        try:
            samples, facts = read_samples(path)
        except ValueError:
            continue
        # white space between the header's parts says nothing
        assert content[at : at + 1].isspace(), content[at - 20 : at + 20]
        assert facts == expected[1] and len(samples) == len(expected[0])

    tensors, header = rollout_file._encode(scored())
    header |= {"facts": {"n": 1}, "checksum": rollout_file.arrays_checksum(tensors)}
    old = {"format": "r3train-samples-1", "header": json.dumps(header)}
    path.write_bytes(save(tensors, old))
    assert read_samples(path)[1] == {"n": 1}
    header["checksum"] += 1
    path.write_bytes(save(tensors, old | {"header": json.dumps(header)}))
    with pytest.raises(ValueError, match="checksum"):
        read_samples(path)


def test_sampling_masks_keep_their_names_in_files_of_every_version(tmp_path):
    """A file of an earlier version has its masks under these names: lost, they would be sampled anew."""
    path = tmp_path / "s.safetensors"
    write_samples(path, scored(), {})
    with safe_open(path, "np") as file:
        names = {name for name in file.keys() if "kept" in name or "mask_" in name}
    assert names == {"kept_counts", "kept_counts.length", "kept_ids", "kept_ids.length"}
    assert holds_field(path, "mask_counts") is True
    back, before = [s for s, _ in read_samples(path)[0]], [s for s, _ in scored()]
    assert [s.mask_ids.tolist() for s in back] == [s.mask_ids.tolist() for s in before]
