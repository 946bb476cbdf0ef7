"""A series moved onto another release: verdicts, resumable moves, and landing all at once."""
