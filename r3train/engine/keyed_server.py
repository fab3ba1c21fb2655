"""``python -m r3train.engine.keyed_server FLAGS...``: SGLang's server with a key from the environment.

SGLang takes its key as a flag, which everybody on the node could read in ``ps``, and writes it to
its log with all its arguments.  This program adds the flag inside the process and hides it in the
log.

Source: SGLang 0.5.23, ``launch_server.py`` (arguments from ``sys.argv``) and
``Engine._launch_subprocesses`` (``logger.info(f"server_args=...")``).
"""

from __future__ import annotations

import logging
import os
import runpy
import sys

from r3train.engine.key import ENGINE_KEY_VARIABLE

_HIDDEN = "***"


def hide_in_logs(secret: str) -> None:
    """Replace a text in every log record of this process, for all loggers and handlers."""
    make = logging.getLogRecordFactory()

    def record_without(*args: object, **kwargs: object) -> logging.LogRecord:
        record = make(*args, **kwargs)
        try:
            message = record.getMessage()
        except (TypeError, ValueError):  # a bad format string: the handler reports it
            return record
        if secret in message:
            record.msg, record.args = message.replace(secret, _HIDDEN), None
        return record

    logging.setLogRecordFactory(record_without)


def main() -> None:
    """Run SGLang's server in this process; its workers inherit no key."""
    key = os.environ.pop(ENGINE_KEY_VARIABLE)
    hide_in_logs(key)
    sys.argv += ["--api-key", key]
    # as __main__ under its own name: spawned workers import it by that name
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
