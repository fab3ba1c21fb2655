"""Give a tiny model's tokenizer a chat template of its own words: python use_template.py MODEL."""

from __future__ import annotations

import json
import sys
from pathlib import Path

TEMPLATE = (
    "{% if tools %}count <eos> {% endif %}{% for m in messages %}{{ m.content }} <eos> {% endfor %}"
    "{% if add_generation_prompt %}to{% endif %}"
)

file = Path(sys.argv[1]) / "tokenizer_config.json"
file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": TEMPLATE}))
