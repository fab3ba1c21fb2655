qwen --yolo --auth-type openai --model $OPENAI_MODEL -p "$PROMPT"
