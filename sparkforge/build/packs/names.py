"""Names of a pack in a build."""

UPSTREAM = "flashinfer"
STAGE, LABEL = "packs", "pack flashinfer"
LOCK = "requirements/packs.txt"
"""The compiler's wheels."""
