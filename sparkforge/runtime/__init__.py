"""Where programs run: engine, containers, environments, servers."""
