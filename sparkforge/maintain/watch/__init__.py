"""Newer releases of the upstreams, and their effect on the series."""
