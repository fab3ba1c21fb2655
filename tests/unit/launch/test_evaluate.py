"""``r3train eval`` against a server that is there: rows, numbers, exit code."""

import asyncio
import json

from aiohttp import web
from click.testing import CliRunner

from r3train.cli import main
from r3train.config.options import parse_train_flags
from r3train.commands.eval_command import with_defaults
from r3train.observe.metrics import read_evaluations
from tests.fakes.server import Fake, answer_to


def held_out(path, count=3):
    line = {"input": "name fruits", "label": ["apple"]}
    path.write_text(f"{json.dumps(line)}\n" * count)
    return path


class Server(Fake):
    """Answers with token 9 of weight version ``version(n)``, of the n-th answer."""

    def __init__(self, version=lambda n: 7):
        super().__init__(self.answer)
        self.version, self.answered = version, 0

    async def answer(self, request, body):
        if request.path in ("/model_info", "/server_info"):
            return web.json_response({})
        answer = answer_to(body)
        if request.path == "/generate":
            label = str(self.version(self.answered))
            answer["meta_info"]["weight_versions"] = [{"version": label, "start": 0, "end": 1}]
            self.answered += 1
        return web.json_response(answer)

    @property
    def generated(self):
        return [b for b, path in zip(self.bodies, self.paths) if path == "/generate"]


async def evaluate(server, tiny, run_dir, *flags):
    async with server.running() as addr:
        command = ["eval", str(tiny / "model"), "--rollout-external-engine-addrs", addr]
        command += ["--rm-type", "accepted_words", "--eval-max-response-len", "4", "--no-progress"]
        command += ["--rollout-stop-token-ids", "9"]
        command += ["--run-dir", str(run_dir), "--no-tensorboard", *flags]
        return await asyncio.to_thread(CliRunner().invoke, main, command)


async def test_every_set_is_asked_with_its_sampling_and_written(tiny, tmp_path):
    server, path = Server(), str(held_out(tmp_path / "a.jsonl"))
    flags = ["--eval-prompt-data", "a", path, "b", path, "--n-samples-per-eval-prompt", "2"]
    flags += ["--eval-temperature", "0.25", "--eval-top-p", "0.5", "--eval-top-k", "3"]
    result = await evaluate(server, tiny, tmp_path / "run", *flags)
    assert result.exit_code == 0, result.output
    assert len(server.generated) == 12
    for body in server.generated:
        asked = body["sampling_params"]
        assert (asked["temperature"], asked["top_p"], asked["top_k"]) == (0.25, 0.5, 3)
        assert asked["max_new_tokens"] == 4 and body["return_routed_experts"] is False
    rows = [json.loads(x) for x in (tmp_path / "run/eval/0000007-b.jsonl").read_text().splitlines()]
    assert [(row["prompt_id"], row["sample"]) for row in rows] == [
        (f"a.jsonl:{prompt}", sample) for prompt in (1, 2, 3) for sample in range(2)
    ]
    lines = read_evaluations(tmp_path / "run")
    assert [(line["step"], line["name"]) for line in lines] == [(7, "a"), (7, "b")]
    assert lines[0]["eval/a/num_samples"] == 6
    assert "evaluation of weight version 7 on a: " in result.output


async def test_a_set_that_cannot_be_evaluated_is_named_and_the_exit_code_is_1(tiny, tmp_path):
    """Somebody gives the server other weights within the first set."""
    server = Server(version=lambda n: 7 + (n > 0 and n < 3))
    path = str(held_out(tmp_path / "a.jsonl"))
    result = await evaluate(
        server, tiny, tmp_path / "run", "--eval-prompt-data", "a", path, "b", path
    )
    assert result.exit_code == 1, result.output
    words = " ".join(result.output.split())
    assert "a was not evaluated: answers of several weight versions: [7, 8]" in words
    assert [line["name"] for line in read_evaluations(tmp_path / "run")] == ["b"]


async def test_a_long_answer_is_asked_for_in_segments_as_a_rollouts_is(tiny, tmp_path):
    class Endless(Server):
        async def answer(self, request, body):
            response = await super().answer(request, body)
            if request.path != "/generate":
                return response
            answer, count = json.loads(response.body), body["sampling_params"]["max_new_tokens"]
            answer["output_ids"] = [8] * count
            meta = answer["meta_info"]
            meta |= {
                "completion_tokens": count,
                "finish_reason": {"type": "length", "length": count},
            }
            meta["output_token_logprobs"] = [[-0.5, 8, None]] * count
            meta["weight_versions"][0]["end"] = count
            return web.json_response(answer)

    server, path = Endless(), str(held_out(tmp_path / "a.jsonl", count=1))
    flags = ("--eval-prompt-data", "a", path, "--rollout-segment-len", "3")
    result = await evaluate(server, tiny, tmp_path / "run", *flags)
    assert result.exit_code == 0, result.output
    first, second = server.generated
    assert first["sampling_params"]["max_new_tokens"] == 3
    assert second["sampling_params"]["max_new_tokens"] == 1
    assert second["input_ids"] == [*first["input_ids"], 8, 8, 8]
    [row] = [
        json.loads(x) for x in (tmp_path / "run/eval/0000007-a.jsonl").read_text().splitlines()
    ]
    assert row["response_len"] == 4 and row["finish_reason"] == "length"


async def test_the_own_function_of_a_set_is_called_for_an_answer_and_not_for_a_group(
    tiny, tmp_path
):
    path, functions = str(held_out(tmp_path / "a.jsonl")), "tests.unit.reward_functions:"
    flags = ("--eval-prompt-data", "a", path, "--eval-rm-type", f"{functions}half")
    training = ("--custom-rm-path", f"{functions}ranks", "--group-rm", "--rm-type", "none")
    result = await evaluate(Server(), tiny, tmp_path / "run", *flags, *training)
    assert result.exit_code == 0, result.output
    [line] = read_evaluations(tmp_path / "run")
    assert line["eval/a/mean"] == 0.5


async def test_a_server_that_is_not_there_is_an_error_without_a_traceback(
    tiny, tmp_path, monkeypatch
):
    monkeypatch.setattr("r3train.engine.sglang_http.CONNECT_RETRIES_S", ())
    monkeypatch.setattr("r3train.engine.sglang_http.DEATH_REPORT_S", 0)
    path = str(held_out(tmp_path / "a.jsonl"))
    command = ["eval", str(tiny / "model"), "--rollout-external-engine-addrs", "127.0.0.1:9"]
    command += ["--rm-type", "accepted_words", "--eval-max-response-len", "4", "--no-progress"]
    command += ["--rollout-stop-token-ids", "9"]
    command += ["--run-dir", str(tmp_path / "run"), "--eval-prompt-data", "a", path]
    result = await asyncio.to_thread(CliRunner().invoke, main, command)
    assert result.exit_code == 1 and "127.0.0.1:9" in result.output, result.output
    assert isinstance(result.exception, SystemExit)


def test_an_evaluation_does_not_wait_for_restarts_that_only_training_makes(tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("[faults]\nmax_engine_restarts = 3\n")
    flags = ("--config", str(recipe), "--num-rollout", "1", "--rollout-batch-size", "1")
    flags += ("--prompt-data", "a", "--rollout-max-response-len", "4")
    config = parse_train_flags(with_defaults(tmp_path, flags), prog_name="eval")
    assert config.faults.max_engine_restarts == 0


async def test_an_evaluation_warns_of_programs_and_refuses_trackers(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("r3train.launch.job.preflight.isolation", lambda: ())
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"input": "cat", "label": ["assert f(1) == 2"]}) + "\n")
    flags = ("--eval-prompt-data", "a", str(path), "--rm-type", "boxed_code")
    result = await evaluate(Server(), tiny, tmp_path / "run", *flags)
    assert result.exit_code == 0, result.output
    shown = " ".join(result.output.split())
    assert "warning: programs of the reward code have the network" in shown
    result = await evaluate(Server(), tiny, tmp_path / "other", *flags, "--use-wandb")
    assert result.exit_code == 2 and "--use-wandb has no effect on an evaluation" in result.output
