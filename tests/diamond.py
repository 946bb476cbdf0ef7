"""A data set in the format of gpqa_diamond.csv, with made-up questions."""

from __future__ import annotations

import csv
from pathlib import Path


def diamond(path: Path, count: int = 198, **changes: str) -> Path:
    """Write it; returns its path."""
    row = {"Question": "How, and\nwhy {not}?", "Correct Answer": "right"}
    row |= {f"Incorrect Answer {number}": f"wrong {number}" for number in (1, 2, 3)} | changes
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["Record ID", *row])
        writer.writeheader()
        writer.writerows({"Record ID": str(at), **row} for at in range(count))
    return path
