"""Addresses of servers that a flag names, separated by commas, and the name of their API key."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from ipaddress import ip_address
from urllib.parse import urlsplit

from plugin.config.flags import expect


def parse_urls(text: str | None) -> tuple[str, ...]:
    """The addresses, without a slash at the end."""
    return tuple(url.strip().rstrip("/") for url in (text or "").split(",") if url.strip())


def check_urls(option: str, urls: Sequence[str], *, key_option: str, travels: str) -> None:
    """Refuse addresses that are none, hold a secret or are named twice; warn of plain HTTP.

    option: what named them; key_option: the flag for their API key; travels: what they are sent
    """
    # The value is not shown: it would carry the secret into the logs.
    expect(
        not {"@", "?"} & set("".join(urls)),
        f"{option} holds a password or key (user:password@ or ?key=...), which run files "
        "and the process list would show; put the servers' API key into an environment "
        f"variable and give its name with {key_option}",
    )
    for url in urls:
        expect(
            _is_address(url), f"{option} holds {url!r}; expected http://host:port, port below 65536"
        )
        parts = urlsplit(url)
        if parts.scheme == "http" and not _is_loopback(str(parts.hostname)):
            warnings.warn(
                f"{option} {url}: {travels} and the API key, if there is one, travel unencrypted; "
                "keep the servers on a private network, or use https",
                stacklevel=4,
            )
    doubled = [url for url in urls if urls.count(url) > 1]
    expect(not doubled, f"{option} names {doubled[:1]} twice; name every server once")


def check_key_variable(option: str, name: str | None) -> None:
    """Refuse what cannot be the name of an environment variable: the key itself, perhaps."""
    expect(
        name is None or re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name) is not None,
        f"{option} must be the name of an environment variable that holds the key, not the key; "
        "export it and give its name",
    )


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number or too large, brackets that do not close
        return False


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
