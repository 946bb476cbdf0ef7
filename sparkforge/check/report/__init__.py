"""The page about a build, and the status table of docs."""
