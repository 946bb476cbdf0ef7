"""What runs beside vLLM in the image: profile, start checks, health, supervision.

Standard library only (and vLLM's own packages where named): the image copies this package and
nothing else of sparkforge. Nothing here imports the rest of sparkforge.
"""
