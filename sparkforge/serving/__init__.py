"""The code that runs with vLLM in the image: profile, start checks, health, supervision.

The image copies this package and nothing else of sparkforge. So it imports the standard library
only, and vLLM's own packages where noted.
"""
