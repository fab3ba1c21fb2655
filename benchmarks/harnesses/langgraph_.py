import sys

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

from task import add, judge, model, prompt

how = sys.argv[1]
asked = {"messages": [{"role": "user", "content": prompt}]}
if how == "invoke":
    agent = create_agent(ChatOpenAI(model=model), [add], system_prompt="You add.")
    judge(agent.invoke(asked)["messages"][-1].content)
elif how == "stream":
    chat = ChatOpenAI(model=model, streaming=True, stream_usage=True)
    agent = create_agent(chat, [add], system_prompt="You add.")
    *_, (_, last) = agent.stream(asked, stream_mode=["messages", "values"])
    judge(last["messages"][-1].content)
elif how == "responses":
    agent = create_agent(ChatOpenAI(model=model, use_responses_api=True), [add])
    judge(agent.invoke(asked)["messages"][-1].text)
elif how == "anthropic":
    from langchain_anthropic import ChatAnthropic

    agent = create_agent(ChatAnthropic(model=model, max_tokens=500, streaming=True), [add])
    *_, (_, last) = agent.stream(asked, stream_mode=["messages", "values"])
    judge(last["messages"][-1].text)
else:

    class Sum(BaseModel):
        """A sum."""

        answer: int

    judge(ChatOpenAI(model=model).with_structured_output(Sum, method=how).invoke(prompt).answer)
