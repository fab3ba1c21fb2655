import sys

from inspect_ai import eval as evaluate, Task
from inspect_ai.agent import react
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.tool import tool

from task import add, judge, model, prompt


@tool(name="add")
def adder():
    async def execute(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: one number
            b: the other number
        """
        return add(a, b)

    return execute


task = Task([Sample(prompt, target="3")], solver=react(tools=[adder()]), scorer=includes())
arguments = {"responses_api": False} if "chat" in sys.argv else {}
[log] = evaluate(task, model=f"openai/{model}", model_args=arguments, display="plain")
judge(log.samples[0].output.completion if log.samples else log.error)
