"""Memory and time of a run, from config.json alone."""
