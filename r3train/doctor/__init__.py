"""``r3train doctor``: faults of this machine and this configuration, each with a remedy."""
