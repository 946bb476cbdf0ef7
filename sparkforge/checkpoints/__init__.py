"""The small models that stand in for the real one."""
