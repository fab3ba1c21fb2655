"""Settings of every test."""

from hypothesis import settings

# a busy machine is slow: an example has no time limit
settings.register_profile("r3train", deadline=None)
settings.load_profile("r3train")
