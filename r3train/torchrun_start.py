"""Keep torchrun from following a mistake in the settings with its own traceback.

A rank says in one line what is wrong and exits with 2.  torchrun then shows forty lines of its own, in which
nothing is about the mistake.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import TracebackType

_PROGRAM, _USAGE_ERROR = "train_async.py", 2


def leave_mistakes_to_the_ranks() -> None:
    """In the process of a torchrun that starts ``train_async.py``, show no traceback where a rank's 2 ended it.

    torch calls it at the end of its import where r3train is installed (entry point ``torch.backends``); any
    other process it leaves as it is.
    """
    is_rank = "TORCHELASTIC_RUN_ID" in os.environ
    if is_rank or _PROGRAM not in {Path(word).name for word in sys.orig_argv[1:]}:
        return
    shown = sys.excepthook

    def hook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        first = getattr(error, "get_first_failure", None)
        if first is None or first()[1].exitcode != _USAGE_ERROR:
            shown(kind, error, traceback)

    sys.excepthook = hook
