"""Judgements: verify, doctor, proofs, performance."""
