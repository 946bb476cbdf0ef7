"""The code that runs with vLLM in the image, which copies this package and nothing else."""
