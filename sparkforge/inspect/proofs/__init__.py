"""Proofs from machine code: patched kernels compile for SM12x, and to which instructions."""
