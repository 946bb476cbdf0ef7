"""Small models that replace the real one in tests and preflight."""
