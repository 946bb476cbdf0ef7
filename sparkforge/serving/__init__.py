"""The code that runs with vLLM in the image: profile, start checks, health, supervision.

The image copies this package and nothing else of sparkforge. It imports only libraries that the
images' locks have: pydantic, PyYAML, Jinja and huggingface_hub.
"""
