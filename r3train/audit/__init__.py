"""Judge a finished run from its files: ``r3train check-evidence``."""
