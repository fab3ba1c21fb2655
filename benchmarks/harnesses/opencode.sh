cat > opencode.json <<JSON
{"autoupdate": false, "share": "disabled", "permission": "allow", "model": "r3/$OPENAI_MODEL",
 "provider": {"r3": {"npm": "@ai-sdk/openai-compatible", "name": "r3",
  "options": {"baseURL": "$OPENAI_BASE_URL", "apiKey": "$OPENAI_API_KEY"},
  "models": {"$OPENAI_MODEL": {"name": "r3train", "limit": {"context": 100000, "output": 4096}}}}}}
JSON
opencode run "$PROMPT"
