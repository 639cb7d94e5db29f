"""Checks of what a user says about a chat model, before any request."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from comlrl_lightning.utilities.checks import check_number

OWN_FIELDS = frozenset(
    {"model", "messages", "system", "n", "temperature", "max_tokens", "max_completion_tokens", "stream"}
)


def check_arguments(
    model: str,
    base_url: str | None,
    api_key_env: str | None,
    temperature: float | None,
    request_fields: Mapping[str, Any] | None,
    timeout_seconds: float,
) -> None:
    """Refuse settings of a chat client that cannot be right, or would give a key away; none is shown.

    Raises:
        ValueError: One is.
    """
    if not isinstance(model, str) or not model:
        raise ValueError(f"model={model!r} is no name. Give the provider's name of a model.")
    _check_url(base_url)
    if api_key_env and not re.fullmatch(r"[A-Z_][A-Z0-9_]*", api_key_env):
        # It may well be the key, which no message may show.
        raise ValueError(
            "api_key_env=... is no name of an environment variable in capital letters. Put the key into a variable "
            "such as MY_API_KEY, and give that name."
        )
    if temperature is not None:
        check_number("a number of at least 0, or None", lambda value: value >= 0, temperature=temperature)
    check_number("a number above 0", lambda value: value > 0, timeout_seconds=timeout_seconds)
    if request_fields is not None and not isinstance(request_fields, Mapping):
        raise ValueError(f"request_fields={request_fields!r} is no mapping. Give a dict of fields by name.")
    if secret := sorted(filter(_may_hold_a_key, _names(request_fields or {}))):
        raise ValueError(
            f"request_fields=... holds {secret[0]!r}, which would end up in every checkpoint. Put the key into an "
            "environment variable, and give its name as api_key_env."
        )
    if taken := sorted(OWN_FIELDS & set(request_fields or {})):
        raise ValueError(f"request_fields=... holds {taken[0]!r}, which the comparator sets itself. Leave it out.")


def _names(fields: object) -> Iterator[str]:
    """The names of all fields, nested ones included."""
    if isinstance(fields, Mapping):
        for name, value in fields.items():
            yield str(name)
            yield from _names(value)
    elif isinstance(fields, list | tuple):
        for value in fields:
            yield from _names(value)


def _may_hold_a_key(name: str) -> bool:
    plain = name.lower().replace("-", "_")
    return plain in ("key", "token", "authorization", "extra_headers", "headers") or plain.endswith(
        ("api_key", "apikey", "access_key", "secret_key", "secret", "password", "_token")
    )


def _check_url(base_url: str | None) -> None:
    if base_url is None:
        return
    parts = urlsplit(base_url) if isinstance(base_url, str) else None
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("base_url=... is no address. Give one such as 'http://localhost:8000/v1'.")
    if parts.username is not None or parts.password is not None or parts.query:
        raise ValueError(
            "base_url=... holds a user name, a password or a query, which would end up in every checkpoint. Give the "
            "address alone, and the key through api_key_env."
        )
