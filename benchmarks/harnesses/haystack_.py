import sys

from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import tool

from task import add, base_url, judge, model, prompt

kind = OpenAIChatGenerator if sys.argv[1] == "chat" else OpenAIResponsesChatGenerator
chat = kind(model=model, api_base_url=base_url)
agent = Agent(chat_generator=chat, tools=[tool(add)], system_prompt="You add.")
judge(agent.run(messages=[ChatMessage.from_user(prompt)])["messages"][-1].text)
