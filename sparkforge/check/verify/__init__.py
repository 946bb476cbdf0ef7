"""Check wheels and images: against a second build, or against this checkout."""
