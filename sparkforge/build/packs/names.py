"""What a build calls a pack."""

UPSTREAM = "flashinfer"
STAGE, LABEL = "packs", "pack flashinfer"
LOCK = "requirements/packs.txt"
"""The compiler's wheels."""
