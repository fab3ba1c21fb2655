"""Show a finished run from its files: ``r3train report`` and plot.png."""
