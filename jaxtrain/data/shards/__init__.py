"""Tokens on disk: the format of shards, and the user's cache of them."""
