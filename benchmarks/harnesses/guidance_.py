from guidance import assistant, gen, models, user

from task import base_url, judge, key, model, prompt

chat = models.OpenAI(model, api_key=key, base_url=base_url)
with user():
    chat += prompt
with assistant():
    chat += gen("answer", max_tokens=10)
judge(chat["answer"])
