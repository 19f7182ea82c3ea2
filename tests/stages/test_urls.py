"""Texts that hold URLs are written down without the user info in them, and else as they are."""

import pytest

from stages.urls import without_user_info


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("POST https://me:hunter2@host/api failed", "POST https://host/api failed"),
        ("(url='https://token@host:8080')", "(url='https://host:8080')"),
        ("postgresql+asyncpg://u:p@ss@db/x and s3://k:v@b", "postgresql+asyncpg://db/x and s3://b"),
        ("https://host/@scope/x?to=me@example.org", "https://host/@scope/x?to=me@example.org"),
        ('{"at": "https://host", "mail": "me@host"}', '{"at": "https://host", "mail": "me@host"}'),
        ("https://host\nme@host", "https://host\nme@host"),
    ],
)
def test_user_info_is_taken_out(text: str, kept: str) -> None:
    assert without_user_info(text) == kept
