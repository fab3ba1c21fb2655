"""The three outcomes of a proof: of a step, of a claim, of a run."""

PASSED, FAILED, NO_EVIDENCE = "passed", "failed", "no evidence"
