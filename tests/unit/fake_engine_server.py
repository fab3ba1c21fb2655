"""Other name of the fake server over HTTP: new tests take tests/fakes/server.py."""

from tests.fakes.server import (  # noqa: F401
    answer_to,
    client_of,
    Fake,
    hang_up,
    one,
    PROMPT,
    refuse,
    SAMPLING,
)
