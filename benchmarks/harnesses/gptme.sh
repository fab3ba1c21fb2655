gptme --non-interactive --model local/$OPENAI_MODEL "$PROMPT"
