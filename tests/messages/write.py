"""Write the transcripts anew: ``make messages``."""

from __future__ import annotations

import tempfile
from pathlib import Path

from r3train.cpu.torchvision_stub import declare_ops_for_imports
from tests.messages.transcripts import write_all

if __name__ == "__main__":
    declare_ops_for_imports()
    with tempfile.TemporaryDirectory() as directory:
        write_all(Path(directory))
