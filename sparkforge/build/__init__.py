"""The build: its graph, stages, image and what is published."""
