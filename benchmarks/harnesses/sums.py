"""A taskset of verifiers: sums with a tool."""

import verifiers.v1 as vf

__all__ = ["Sums"]


class Sum(vf.TaskData):
    answer: str


class Adds(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "sums"

    @vf.tool
    def add(self, a: int, b: int) -> int:
        return a + b


class Config(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class SumTask(vf.Task[Sum, vf.State, Config]):
    @classmethod
    def toolsets(cls, config):
        return [Adds(config.tools)]

    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in str(trace.last_reply))


class SumsConfig(vf.TasksetConfig):
    task: Config = Config()


class Sums(vf.Taskset[SumTask, SumsConfig]):
    def load(self):
        data = [Sum(prompt=f"{n} + 1?", answer=str(n + 1)) for n in (1, 2)]
        return [SumTask(row, self.config.task) for row in data]


if __name__ == "__main__":
    Adds.run()
