"""Newer releases of the upstreams, and what they would do to the series."""
