export CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1 IS_SANDBOX=1
claude -p "$PROMPT" --dangerously-skip-permissions
