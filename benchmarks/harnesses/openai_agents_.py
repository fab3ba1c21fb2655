import asyncio
import sys

from agents import Agent, function_tool, Runner

from task import add, judge, prompt

agent = Agent("adder", instructions="You add.", tools=[function_tool(add)])


async def streamed() -> object:
    run = Runner.run_streamed(agent, prompt)
    async for _ in run.stream_events():
        pass
    return run.final_output


judge(
    asyncio.run(streamed()) if "stream" in sys.argv else Runner.run_sync(agent, prompt).final_output
)
