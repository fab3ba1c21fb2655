"""The rooms of families and settings, imported without torch: a laptop's --help and estimate need none."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
import r3train.config, r3train.families, r3train.patches, r3train.ids, r3train.types, r3train.user_code
from r3train.families import FAMILIES
assert len(FAMILIES) > 10
print(*sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "megatron", "sglang", "transformers"}))
"""


def test_families_settings_and_patches_are_imported_without_torch():
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300, check=True
    )
    assert ended.stdout.split() == []
