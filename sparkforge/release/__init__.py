"""A build as a release: its checks, its folder, and its image in a registry."""
