"""Pins and options → items: inputs and maker of each kind.

There is one module for each kind. An item's key has a digest of its module's imports (``codekey``),
so a module must not import code that only another kind needs.
"""
