gemini --yolo -m $OPENAI_MODEL -p "$PROMPT"
