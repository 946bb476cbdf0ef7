"""``build.py doctor``: will this machine build and serve a target, and if not, what fixes it?"""
