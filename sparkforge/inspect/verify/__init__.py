"""Whether wheels and images are what the pins say."""
