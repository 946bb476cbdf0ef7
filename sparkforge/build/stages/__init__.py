"""What each kind of item is made from, and how: pins and options → items.

One module a kind: the digest of the code in an item's key is that of its module's imports
(``codekey``), so what another kind needs must not be imported here.
"""
