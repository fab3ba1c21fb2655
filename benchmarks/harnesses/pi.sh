mkdir -p $HOME/.pi/agent
cat > $HOME/.pi/agent/models.json <<JSON
{"providers": {"r3": {"baseUrl": "$OPENAI_BASE_URL", "api": "${1:-openai-completions}", "apiKey": "OPENAI_API_KEY",
 "models": [{"id": "$OPENAI_MODEL"}]}}}
JSON
pi --provider r3 --model $OPENAI_MODEL -p "$PROMPT"
