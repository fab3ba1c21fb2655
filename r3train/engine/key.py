"""The key that servers ask for, and how it travels: by the environment, never by a command line.

A process' environment is read by its user and by root; its command line by everybody on the node.
"""

from __future__ import annotations

from collections.abc import Mapping

ENGINE_KEY_VARIABLE = "R3TRAIN_ENGINE_API_KEY"
_LEAST_LEN = 16


def engine_api_key(environ: Mapping[str, str]) -> str | None:
    """The key of the job's servers, its own or others'; None where none is set.

    Raises ValueError, without showing it, for a key that is short or cannot stand in an HTTP header.
    """
    key = environ.get(ENGINE_KEY_VARIABLE)
    if key is None:
        return None
    if len(key) < _LEAST_LEN or not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError(
            f"environment variable {ENGINE_KEY_VARIABLE}: got {len(key)} characters, expected at"
            f" least {_LEAST_LEN}, printable ASCII without spaces (openssl rand -hex 16 makes one)"
        )
    return key
