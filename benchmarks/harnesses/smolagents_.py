import sys

from smolagents import CodeAgent, OpenAIServerModel, tool, ToolCallingAgent

from task import add, base_url, judge, key, model, prompt

kind = ToolCallingAgent if sys.argv[1] == "tools" else CodeAgent
chat = OpenAIServerModel(model, api_base=base_url, api_key=key)
judge(kind(tools=[tool(add)], model=chat, max_steps=4).run(prompt))
