"""Pinned files and commits, fetched into the store."""
