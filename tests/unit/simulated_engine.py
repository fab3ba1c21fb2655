"""Other name of the fake server in process: new tests take tests/fakes/server.py."""

from tests.fakes.server import (  # noqa: F401
    PROMPT_LEN,
    prompt_for,
    RETRACTED,
    rollout_section,
    ROUTES,
    SimulatedEngine,
)
