"""Patch files: read, checked, applied, exported, imported."""
