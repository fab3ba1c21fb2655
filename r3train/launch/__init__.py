"""Start of a job: what it reads and checks (``job``), how it runs (``start``), what it will hold (``estimate``)."""
