"""Proofs from machine code: that what we change compiles for SM12x, and to what."""
