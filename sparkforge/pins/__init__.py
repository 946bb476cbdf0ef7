"""pins.yaml: read, checked, edited."""
