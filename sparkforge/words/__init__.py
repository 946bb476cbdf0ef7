"""The arguments of each command: its options, and the function that they call."""
