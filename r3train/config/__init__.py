"""The configuration: TOML files and flags, checked before anything starts.  Never imports torch."""

from r3train.config.run import RunConfig
from r3train.config.sources import ConfigError

__all__ = ["ConfigError", "RunConfig"]
