"""Patches left out: their own tests, other checks, bisecting."""
