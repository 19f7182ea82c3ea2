"""URLs as they may be written down."""

import re

_USER_INFO = re.compile(r"(?<=://)[^\s/?#\"<>]*@")


def without_user_info(text: str) -> str:
    """``text`` with ``https://host`` for each ``https://user:password@host`` in it."""
    return _USER_INFO.sub("", text)
