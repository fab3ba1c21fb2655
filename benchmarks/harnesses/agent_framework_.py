import asyncio
import sys

from agent_framework import Agent
from agent_framework.openai import OpenAIChatClient, OpenAIChatCompletionClient

from task import add, judge, prompt

kind = OpenAIChatCompletionClient if sys.argv[1] == "chat" else OpenAIChatClient


async def main() -> object:
    options = {"store": False} if sys.argv[1] == "unstored" else None
    agent = Agent(client=kind(), instructions="You add.", tools=[add], default_options=options)
    return (await agent.run(prompt)).text


judge(asyncio.run(main()))
