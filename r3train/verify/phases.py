"""The phases that two outcomes are compared in, and how far apart they may be."""

from __future__ import annotations

ROUTES, FORWARD, LOSS, GRADIENTS, DELTAS, EXPORT = range(6)
PHASE_NAMES = ("routes", "forward", "loss", "gradients", "deltas", "export")
# a planted bug must miss the threshold of its phase by this factor
REQUIRED_FACTOR = 10.0

# Float32: relative L2, the maximum over layers and parameters.  The threshold is NOISE_FACTOR times
# the noise measured in the same run, and never above the gate.  Phases 0 and 5 are exact.
GATES = {FORWARD: 1e-5, LOSS: 1e-6, GRADIENTS: 1e-4, DELTAS: 1e-3}
NOISE_FACTOR = 10.0
# bfloat16 weights and activations; steps are not compared (their size is below bfloat16's)
BF16_THRESHOLDS = {ROUTES: 0.0, FORWARD: 0.05, LOSS: 0.02, GRADIENTS: 0.3, EXPORT: 0.0}
