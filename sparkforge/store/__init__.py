"""The cache: results by the hash of their inputs."""
