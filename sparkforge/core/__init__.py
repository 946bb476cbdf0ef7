"""What knows nothing of sparkforge: errors, log, processes, files, git."""
