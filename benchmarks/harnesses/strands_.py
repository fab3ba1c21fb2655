import sys

from strands import Agent, tool

from task import add, base_url, judge, key, model, prompt

client = {"base_url": base_url, "api_key": key}
if sys.argv[1] == "chat":
    from strands.models.openai import OpenAIModel

    chat = OpenAIModel(client_args=client, model_id=model)
elif sys.argv[1] == "responses":
    from strands.models.openai_responses import OpenAIResponsesModel

    chat = OpenAIResponsesModel(client_args=client, model_id=model)
else:
    from strands.models.anthropic import AnthropicModel

    client = {"base_url": base_url.removesuffix("/v1"), "api_key": key}
    chat = AnthropicModel(client_args=client, model_id=model, max_tokens=500)
judge(Agent(model=chat, tools=[tool(add)], system_prompt="You add.")(prompt))
