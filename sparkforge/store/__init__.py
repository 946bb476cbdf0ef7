"""The cache: what was built, by the hash of what it was built from."""
