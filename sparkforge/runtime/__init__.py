"""Places where programs run: engine, containers, environments, servers."""
