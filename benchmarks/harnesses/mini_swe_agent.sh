export MSWEA_COST_TRACKING=ignore_errors MSWEA_CONFIGURED=true LITELLM_LOCAL_MODEL_COST_MAP=True
mini --yolo --exit-immediately --model openai/$OPENAI_MODEL --task "$PROMPT" --output trajectory.json
