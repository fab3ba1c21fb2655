"""Make the toy task from a tiny model's directory: python prepare.py runs/agents-tiny.

The tokenizer gets a chat template of its own words, and each prompt's metadata the words that it accepts, for
harnesses get no label. A real task keeps what decides its reward where no tool of the model reaches.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

TEMPLATE = (
    "{% if tools %}the <eos> {% endif %}{% for m in messages %}{{ m.content }} <eos> {% endfor %}"
    "{% if add_generation_prompt %}give{% endif %}"
)

directory = Path(sys.argv[1])
config = directory / "model" / "tokenizer_config.json"
config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": TEMPLATE}))
rows = map(json.loads, (directory / "prompts.jsonl").read_text().splitlines())
lines = [json.dumps(row | {"metadata": {"accepted": row["label"]}}) for row in rows]
(directory / "agents.jsonl").write_text("\n".join(lines) + "\n")
