import asyncio

from claude_agent_sdk import ClaudeAgentOptions, create_sdk_mcp_server, query, ResultMessage, tool

from task import add, judge, prompt


@tool("add", "Add two numbers.", {"a": int, "b": int})
async def adder(arguments: dict) -> dict:
    return {"content": [{"type": "text", "text": str(add(**arguments))}]}


async def main() -> object:
    server = create_sdk_mcp_server("sums", tools=[adder])
    options = ClaudeAgentOptions(mcp_servers={"sums": server}, allowed_tools=["mcp__sums__add"])
    async for message in query(prompt=prompt, options=options):
        if isinstance(message, ResultMessage):
            return message.result


judge(asyncio.run(main()))
