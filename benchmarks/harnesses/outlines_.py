import openai
import outlines
from pydantic import BaseModel

from task import judge, model, prompt


class Sum(BaseModel):
    answer: int


judge(outlines.from_openai(openai.OpenAI(), model)(prompt, Sum))
