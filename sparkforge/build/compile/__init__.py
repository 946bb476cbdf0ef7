"""Compiled wheels: builder image, external sources, steps in containers, results."""
