"""Tools for maintainers, which no build needs."""
