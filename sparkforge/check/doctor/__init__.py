"""``build.py doctor``: check that this machine can build and serve a target, with hints."""
