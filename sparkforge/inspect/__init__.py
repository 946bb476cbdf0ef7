"""Judging: verify, doctor, proofs, performance."""
