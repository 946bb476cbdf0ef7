# SPDX-License-Identifier: Apache-2.0
"""Kernels for vLLM's decode steps of one to eight rows."""


def register() -> None:
    """Do nothing yet."""
