import asyncio

from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
from semantic_kernel.functions import kernel_function

from task import add, judge, model, prompt


class Tools:
    @kernel_function(name="add", description="Add two numbers.")
    def add(self, a: int, b: int) -> int:
        return add(a, b)


async def main() -> object:
    chat = OpenAIChatCompletion(ai_model_id=model)
    agent = ChatCompletionAgent(service=chat, name="adder", plugins=[Tools()])
    return (await agent.get_response(prompt)).content


judge(asyncio.run(main()))
