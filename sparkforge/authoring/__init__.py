"""Writing patches: work trees of commits, and the way back into the series."""
