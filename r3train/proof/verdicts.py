"""The outcomes of a proof: of a step, of a claim, of a run."""

PASSED, FAILED, NO_EVIDENCE = "passed", "failed", "no evidence"
# a statistic is beyond twice the usual, and fails if it stays there (see ``suspicion``)
SUSPECT = "suspect"
