"""The README names every file, with the line that the file opens with."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("configs", "stages", "backends", "flows")


def opening(path: Path) -> str:
    """The first line of a module's docstring."""
    return (ast.get_docstring(ast.parse(path.read_text())) or "").splitlines()[0]


def listing() -> str:
    """The README's list of files."""
    lines = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            lines.append(f"- `{path.relative_to(ROOT)}`: {opening(path)}")
    return "\n".join(lines)


def test_every_file_has_its_line() -> None:
    assert listing() in (ROOT / "README.md").read_text()


if __name__ == "__main__":
    print(listing())
