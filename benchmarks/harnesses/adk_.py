import asyncio

from google.adk.agents import Agent
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner

from task import add, judge, model, prompt

agent = Agent(name="adder", model=LiteLlm(f"openai/{model}"), instruction="You add.", tools=[add])
events = asyncio.run(InMemoryRunner(agent=agent).run_debug(prompt))
judge([part.text for event in events for part in event.content.parts])
