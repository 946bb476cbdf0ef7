"""Roofline and quality of the dense layers' formats."""
