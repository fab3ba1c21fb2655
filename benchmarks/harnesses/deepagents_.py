from deepagents import create_deep_agent
from langchain_openai import ChatOpenAI

from task import add, judge, model, prompt

agent = create_deep_agent(model=ChatOpenAI(model=model), tools=[add])
judge(agent.invoke({"messages": [{"role": "user", "content": prompt}]})["messages"][-1].text)
