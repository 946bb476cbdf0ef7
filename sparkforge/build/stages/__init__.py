"""Pins and choices → ``Cached`` results: inputs and maker of each kind."""
