"""Patched work trees as packages that can be edited."""
