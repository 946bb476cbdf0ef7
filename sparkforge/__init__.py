"""sparkforge: pins in, patched and proved wheels and a serving image out."""

__version__ = "0.1.0"
