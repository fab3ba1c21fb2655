import sys

from agno.agent import Agent

from task import add, judge, model, prompt

if sys.argv[1] == "chat":
    from agno.models.openai import OpenAIChat

    chat = OpenAIChat(id=model)
elif sys.argv[1] == "responses":
    from agno.models.openai import OpenAIResponses

    chat = OpenAIResponses(id=model)
else:
    from agno.models.anthropic import Claude

    chat = Claude(id=model)
agent = Agent(model=chat, tools=[add], instructions="You add.", telemetry=False)
judge(agent.run(prompt).content)
