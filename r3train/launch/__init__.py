"""Parts from a configuration: layer 5, where the names of both engines meet."""
