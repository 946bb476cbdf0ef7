# SPDX-License-Identifier: Apache-2.0
"""A trial of the kernels that a server would use, before a model is loaded.

A kernel that faults takes its process along, and one that hangs does not end: so ``child`` runs
them, kind after kind, and ``__main__``, which needs no GPU, gives each a deadline, ends the child
that misses it, and starts another for the rest.
"""
