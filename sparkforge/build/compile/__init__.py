"""Compiled wheels: builder image, external sources, native files in a container."""
