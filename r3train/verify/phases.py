"""The phases that two outcomes are compared in, and how far apart they may be."""

from __future__ import annotations

ROUTES, FORWARD, LOSS, GRADIENTS, DELTAS, EXPORT = range(6)
PHASE_NAMES = ("routes", "forward", "loss", "gradients", "deltas", "export")
# a planted bug must miss the threshold of its phase by this factor
REQUIRED_FACTOR = 10.0
