"""``build.py accept``: does a running server keep what this build promises?"""
