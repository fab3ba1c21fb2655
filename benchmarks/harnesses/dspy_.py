import dspy

from task import add, judge, model, prompt

dspy.configure(lm=dspy.LM(f"openai/{model}", cache=False))
judge(dspy.ReAct("question -> answer: int", tools=[add], max_iters=3)(question=prompt).answer)
