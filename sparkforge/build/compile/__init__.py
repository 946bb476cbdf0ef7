"""Compiled wheels: their builder and externals, the steps in containers, what comes of them."""
