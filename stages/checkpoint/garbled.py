"""What reading a file that others wrote raises when its content is odd, told as one line."""

import pickle
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stages.base import StageError

GARBLED = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    pickle.PickleError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)
"""Of bytes, of settings and of templates, that parsers and model classes can make nothing of."""


@contextmanager
def told_of(place: Path) -> Iterator[None]:
    """Any of :data:`GARBLED` becomes a :class:`StageError` with the place and the reason."""
    try:
        yield
    except StageError:
        raise
    except GARBLED as error:
        raise StageError(
            f"{place}: cannot be read, perhaps cut off ({first_line(error)})"
        ) from None


def first_line(error: Exception) -> str:
    """What an error says. One that says nothing, or only a name, is shown with its type."""
    said = str(error).strip() if not isinstance(error, LookupError) else repr(error)
    return (said or repr(error)).splitlines()[0]
