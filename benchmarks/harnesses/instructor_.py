import sys

import instructor
from openai import OpenAI
from pydantic import BaseModel

from task import judge, model, prompt


class Sum(BaseModel):
    answer: int


client = instructor.from_openai(OpenAI(), mode=instructor.Mode[sys.argv[1]])
messages = [{"role": "user", "content": prompt}]
judge(client.chat.completions.create(model=model, messages=messages, response_model=Sum))
