import asyncio
import sys

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_ext.models.openai import OpenAIChatCompletionClient

from task import add, judge, model, prompt

knows = dict.fromkeys("vision function_calling json_output structured_output".split(), True)


async def main() -> object:
    client = OpenAIChatCompletionClient(model=model, model_info=knows | {"family": "unknown"})
    adder = AssistantAgent("adder", client, tools=[add], reflect_on_tool_use=True)
    if sys.argv[1] == "one":
        return (await adder.run(task=prompt)).messages[-1].content
    critic = AssistantAgent("critic", client, system_message="Criticise.")
    team = RoundRobinGroupChat([adder, critic], termination_condition=MaxMessageTermination(6))
    return [message.content for message in (await team.run(task=prompt)).messages]


judge(asyncio.run(main()))
