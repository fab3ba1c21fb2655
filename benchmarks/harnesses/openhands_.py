import os

from openhands.sdk import Agent, Conversation, LLM, Tool
from openhands.tools.terminal import TerminalTool
from pydantic import SecretStr

from task import base_url, key, model, prompt

llm = LLM(usage_id="agent", model=f"openai/{model}", base_url=base_url, api_key=SecretStr(key))
agent = Agent(llm=llm, tools=[Tool(name=TerminalTool.name)])
conversation = Conversation(agent=agent, workspace=os.getcwd())
conversation.send_message(prompt)
conversation.run()
