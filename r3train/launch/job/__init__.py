"""A job from its files and settings: read and checked before a server or an actor is built."""
