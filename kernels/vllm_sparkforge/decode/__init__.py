# SPDX-License-Identifier: Apache-2.0
"""Kernels for the few rows of a decode step, compiled ahead of time.

``module`` finds and launches them, ``dense`` and ``experts`` are what they compute,
and ``selfcheck`` compares them with the path that they replace. The sources are in
``kernels/csrc``.
"""
