"""Measurements of this project, run by hand."""
