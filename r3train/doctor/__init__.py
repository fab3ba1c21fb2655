"""``r3train doctor``: what will go wrong with this machine and this configuration, and what to do."""
