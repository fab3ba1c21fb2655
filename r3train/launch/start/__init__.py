"""Ranks, servers, actor and their end, where the names of both engines meet."""
