aider --model openai/$OPENAI_MODEL --yes-always --no-check-update --no-show-model-warnings --no-analytics --message "$PROMPT" calc.py "$@"
git log --oneline
