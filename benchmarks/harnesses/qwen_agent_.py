import json

from qwen_agent.agents import Assistant
from qwen_agent.tools.base import BaseTool, register_tool

from task import add, base_url, judge, key, model, prompt

NUMBER = {"type": "integer"}


@register_tool("add")
class Add(BaseTool):
    description = "Add two numbers."
    parameters = {
        "type": "object",
        "properties": {"a": NUMBER, "b": NUMBER},
        "required": ["a", "b"],
    }

    def call(self, params: str, **_: object) -> str:
        return str(add(**json.loads(params)))


chat = {"model": model, "model_server": base_url, "api_key": key}
*_, last = Assistant(llm=chat, function_list=["add"]).run([{"role": "user", "content": prompt}])
judge(last[-1]["content"])
