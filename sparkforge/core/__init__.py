"""Basics without knowledge of sparkforge: errors, log, processes, files, git."""
