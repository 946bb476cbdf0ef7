"""Release wheel + patched tree → overlay wheel."""
