"""``r3train verify`` with the bugs of ``tests/oracle/planted.py`` next to its own, and those of sessions before them.

    python -m tests.oracle.verify_planted [flags of r3train verify]
"""

from __future__ import annotations

import sys

from r3train.cpu.torchvision_stub import declare_ops_for_imports
from r3train.cpu.device import prepare_device

if __name__ == "__main__":
    declare_ops_for_imports()
    prepare_device()
    import tests.oracle.planted  # noqa: F401 - it registers its bugs
    from r3train.verify.verify_command import verify_command
    from tests.oracle.session_bugs import FAILS, survivors

    if "--mutations" in sys.argv:
        if lines := survivors():
            sys.exit("\n".join(lines))
        print(f"planted bugs of sessions: {len(FAILS)} caught", flush=True)
    verify_command()
