"""`build.py bench`: how fast a server is, and whether one is slower than another."""
