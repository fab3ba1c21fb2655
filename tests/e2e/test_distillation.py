"""--use-opd in a whole job: a served teacher of another architecture is the only one who teaches."""

from __future__ import annotations

import numpy as np
import pytest

from r3train.engine.server import SGLangServer
from r3train.loop.replay_source import load_rollout
from r3train.verify.tiny import TinyOptions, build
from tests.e2e import jobs
from tests.hf_reference import HfReference

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ROLLOUTS = 12


def test_the_actor_comes_nearer_to_a_served_teacher_and_a_replay_trains_the_same(
    tmp_path, tiny_flags
):
    build(tmp_path / "teacher", TinyOptions(num_experts=0, num_layers=2, seed=7))
    teacher, key = tmp_path / "teacher" / "model", "a key of the teacher".replace(" ", "-")
    flags = [
        *tiny_flags,
        *jobs.R3_FLAGS,
        "--num-rollout",
        str(ROLLOUTS),
        *"--rm-type none --use-opd --opd-type sglang --lr-warmup-iters 0 --lr 2e-3".split(),
    ]
    log = tmp_path / "teacher.log"
    with SGLangServer(
        teacher, log, server_args={"skip_tokenizer_init": False}, api_key=key
    ) as server:
        server.wait_ready()
        url = ("--opd-teacher-url", f"http://{server.addr}")
        refused = jobs.run(tmp_path / "refused", *flags, *url)
        assert refused.code != 0 and "R3TRAIN_TEACHER_API_KEY" in refused.output
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("R3TRAIN_TEACHER_API_KEY", key)
            job = jobs.run(tmp_path / "run", *flags, *url, "--dump-rollouts")
    assert job.code == 0, job.output
    apart = [m["train/opd_reverse_kl"] for m in job.metrics()]
    print("train/opd_reverse_kl", [round(x, 3) for x in apart])
    assert np.mean(apart[-3:]) < 0.7 * np.mean(apart[:3])
    assert all(m["rollout/reward_mean"] == 0 and m["r3/passed"] for m in job.metrics())
    reference, gaps = HfReference(teacher), []
    for group in load_rollout(job.run_dir / "rollouts", 0):
        for s, _ in group:
            own = s.loss_mask
            expected = reference.answer(s.token_ids)[0]
            np.testing.assert_allclose(s.teacher_log_probs[own], expected[own], atol=1e-4)
            gaps += (s.rollout_log_probs - s.teacher_log_probs)[own].tolist()
    # engine and actor agree at weight version 0
    assert apart[0] == pytest.approx(np.mean(gaps), abs=1e-4)
    again = jobs.run(tmp_path / "again", *flags, "--replay-rollouts", str(job.run_dir / "rollouts"))
    assert again.code == 0, again.output
    jobs.same_numbers(job.metrics(), again.metrics())
