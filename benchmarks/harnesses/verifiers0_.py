import asyncio
import sys

import verifiers as vf
from datasets import Dataset

from task import add, base_url, judge, model, prompt

kind, client = sys.argv[1:]
rows = Dataset.from_list([{"question": prompt, "answer": "3"}])
if kind == "tools":
    rubric = vf.Rubric(funcs=[lambda completion: float("3" in str(completion[-1]))])
    env = vf.ToolEnv(dataset=rows, tools=[add], max_turns=4, rubric=rubric)
elif kind == "reasoning_gym":
    env = vf.ReasoningGymEnv(gym="chain_sum", num_train_examples=5, num_eval_examples=2)
else:
    rubric = vf.JudgeRubric()

    async def judged(judge, prompt, completion, answer, state) -> float:
        return float("yes" in (await judge(prompt, completion, answer, state)).lower())

    rubric.add_reward_func(judged)
    env = vf.SingleTurnEnv(dataset=rows, rubric=rubric)


async def main() -> object:
    url = base_url.removesuffix("/v1") if client == "anthropic_messages" else base_url
    config = vf.ClientConfig(api_base_url=url, api_key_var="OPENAI_API_KEY", client_type=client)
    out = await env.run_rollout(env.get_dataset()[0], config, model, {"max_tokens": 512})
    print(out["reward"], out.get("error"))
    return out["completion"]


judge(asyncio.run(main()))
