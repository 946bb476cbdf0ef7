"""Proofs from machine code: patched kernels compile for SM12x, to the required instructions."""
