"""Checks of a checkpoint: against its family, and of the settings against both."""
