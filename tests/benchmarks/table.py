"""What the benchmarks share: a median with its range, and one aligned table."""

from collections.abc import Sequence
from statistics import median


def spread(found: Sequence[float], digits: int = 2) -> str:
    """``1.20 (1.15-1.31)``: the median, and the least and the largest."""
    middle, least, largest = (f"{x:.{digits}f}" for x in (median(found), min(found), max(found)))
    return f"{middle} ({least}-{largest})"


def show(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print ``rows`` under ``head``, columns aligned."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    print(f"\n{title}")
    for row in (head, ["-" * width for width in widths], *rows):
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )
