import sys

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, PromptedOutput

from task import add, judge, model, prompt


class Sum(BaseModel):
    answer: int


how = sys.argv[1]
kind = how if how in ("openai-responses", "anthropic") else "openai-chat"
shapes = {"tool": Sum, "native": NativeOutput(Sum), "prompted": PromptedOutput(Sum)}
agent = Agent(
    f"{kind}:{model}", tools=[add], instructions="You add.", output_type=shapes.get(how, str)
)

judge(agent.run_sync(prompt).output)
