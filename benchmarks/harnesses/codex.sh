mkdir -p $HOME/.codex
cat > $HOME/.codex/config.toml <<TOML
model_provider = "r3train"
[model_providers.r3train]
name = "r3train"
base_url = "$OPENAI_BASE_URL"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
TOML
codex exec -m $OPENAI_MODEL --dangerously-bypass-approvals-and-sandbox "$PROMPT"
