"""The API key of the servers.  It is passed in the environment, never on a command line.

Only its user and root can read a process' environment; everybody on the node can read its command
line.
"""

from __future__ import annotations

from collections.abc import Mapping

ENGINE_KEY_VARIABLE = "R3TRAIN_ENGINE_API_KEY"
_LEAST_LEN = 16


def engine_api_key(environ: Mapping[str, str], variable: str = ENGINE_KEY_VARIABLE) -> str | None:
    """Return the API key of all servers of the job, or None if it is not set.

    variable: another one for servers of somebody else.  Raises ValueError for a key that is short or
    cannot stand in an HTTP header; the message does not show the key.
    """
    key = environ.get(variable)
    if key is None:
        return None
    if len(key) < _LEAST_LEN or not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError(
            f"environment variable {variable}: got {len(key)} characters, expected at"
            f" least {_LEAST_LEN}, printable ASCII without spaces (openssl rand -hex 16 makes one)"
        )
    return key
