"""``train_async.py`` with a bug of tests/oracle/planted.py planted in every rank.

    torchrun -m tests.e2e.train_with_bug BUG [flags of train_async.py]

The server, its routes and the actor are real; the bug is in the production code that they meet in.
"""

from __future__ import annotations

import sys

from r3train.cpu.device import prepare_device
from train_async import main

if __name__ == "__main__":
    prepare_device()
    from tests.oracle.planted import MUTATIONS

    bug = MUTATIONS[sys.argv.pop(1)]
    with bug.patch(None, None):  # these look at no configuration
        main()
