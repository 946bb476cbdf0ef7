"""Changing the series: rebase, watch, ablate, develop."""
