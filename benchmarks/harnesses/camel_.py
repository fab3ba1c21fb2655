from camel.agents import ChatAgent
from camel.models import ModelFactory
from camel.toolkits import FunctionTool
from camel.types import ModelPlatformType

from task import add, base_url, judge, key, model, prompt

chat = ModelFactory.create(
    ModelPlatformType.OPENAI_COMPATIBLE_MODEL, model, url=base_url, api_key=key
)
judge(ChatAgent("You add.", model=chat, tools=[FunctionTool(add)]).step(prompt).msgs[0].content)
