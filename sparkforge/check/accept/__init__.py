"""``build.py accept``: checks of a running server against the promises of this build."""
