"""What the benchmarks share: a median with its range, and one aligned table."""

from collections.abc import Sequence
from statistics import median


def spread(seconds: Sequence[float]) -> str:
    """``1.20 (1.15-1.31)``: the median, and the least and the largest."""
    return f"{median(seconds):.2f} ({min(seconds):.2f}-{max(seconds):.2f})"


def show(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print ``rows`` under ``head``, columns aligned."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    print(f"\n{title}")
    for row in (head, ["-" * width for width in widths], *rows):
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )
