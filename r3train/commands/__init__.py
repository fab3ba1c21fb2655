"""Commands of ``r3train`` that have no room of their own: flags in, lines and an exit code out."""
