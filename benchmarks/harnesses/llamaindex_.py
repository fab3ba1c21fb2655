import asyncio
import sys

from llama_index.core.agent.workflow import FunctionAgent, ReActAgent
from llama_index.llms.openai_like import OpenAILike

from task import add, base_url, judge, key, model, prompt

is_function = sys.argv[1] == "functions"
llm = OpenAILike(
    model=model,
    api_base=base_url,
    api_key=key,
    is_chat_model=True,
    is_function_calling_model=is_function,
    context_window=30000,
)


async def main() -> object:
    kind = FunctionAgent if is_function else ReActAgent
    return await kind(tools=[add], llm=llm, system_prompt="You add.").run(prompt)


judge(asyncio.run(main()))
