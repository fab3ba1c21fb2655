import langroid as lr
import langroid.language_models as lm

from task import judge, model, prompt

config = lr.ChatAgentConfig(llm=lm.OpenAIGPTConfig(chat_model=model))
judge(lr.ChatAgent(config).llm_response(prompt).content)
