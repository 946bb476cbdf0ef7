"""`build.py bench`: the speed of a server, and comparisons of two."""
