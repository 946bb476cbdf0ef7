"""The report page: what was built, how it was checked, and what nobody has run."""
