"""The report page: the build, its checks, and what nobody has run."""
