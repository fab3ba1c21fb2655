import litellm

from task import judge, model, prompt

messages = [{"role": "user", "content": prompt}]
chunks = litellm.completion(f"openai/{model}", messages=messages, stream=True)
judge("".join(chunk.choices[0].delta.content or "" for chunk in chunks))
