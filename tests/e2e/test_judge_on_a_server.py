"""llm_judge against SGLang's own OpenAI endpoint, with its chat template and its key."""

from __future__ import annotations

import asyncio

import pytest
from safetensors.torch import load_file, save_file
from tests.unit.rewards.test_scoring import sample, settings

from r3train.data.tokenizer import load_tokenizer
from r3train.engine.server import SGLangServer
from r3train.rewards.scoring import Scorer
from r3train.verify.tiny import TinyOptions, TrainedTokenizer, build

pytestmark = pytest.mark.e2e
KEY = "the-key-of-the-judge"


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    """Address of a model that writes sevens and eights only."""
    directory = tmp_path_factory.mktemp("judge")
    (directory / "texts.jsonl").write_text('{"text": "Score: 7"}\n')
    texts = TrainedTokenizer(directory / "texts.jsonl", chat_template=True)
    build(directory / "tiny", TinyOptions(vocab_size=300), tokenizer=texts)
    model = directory / "tiny/model"
    weights = load_file(model / "model.safetensors")
    head = weights["lm_head.weight"]
    seven, eight = (load_tokenizer(model).encode(digit)[0] for digit in "78")
    row = head[seven].clone()
    head.zero_()
    head[seven], head[eight] = row, -row
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    args = {"skip_tokenizer_init": False}
    with SGLangServer(model, directory / "log", server_args=args, api_key=KEY) as server:
        server.wait_ready()
        yield server.addr


async def score(address: str, key: str, text: str) -> float:
    data = settings(
        rm_type="llm_judge",
        judge_url=f"http://{address}/v1",
        judge_model="judge",
        judge_pattern="([78])",
        judge_max_tokens=8,
        reward_timeout_s=60.0,
    )
    return await Scorer(data, judge_key=key)(sample(text))


def test_an_sglang_server_judges_and_refuses_another_key(judge):
    async def both():
        return await asyncio.gather(*(score(judge, KEY, text) for text in ("four", "five")))

    assert set(asyncio.run(both())) <= {7.0, 8.0}
    with pytest.raises(ValueError, match="p.jsonl:7: llm_judge .*status 401"):
        asyncio.run(score(judge, "another", "four"))
