from crewai import Agent, Crew, LLM, Task
from crewai.tools import tool

from task import add, base_url, judge, key, model, prompt

llm = LLM(model=f"openai/{model}", base_url=base_url, api_key=key)
agent = Agent(
    role="adder", goal="add numbers", backstory="You add.", tools=[tool("add")(add)], llm=llm
)
task = Task(description=prompt, expected_output="a number", agent=agent)
judge(Crew(agents=[agent], tasks=[task]).kickoff())
