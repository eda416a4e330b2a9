"""Flags of inference servers, and the rules for addresses and API keys that a flag names."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import ClassVar, Literal
from urllib.parse import urlsplit

from plugin.config.engines import ENGINES
from plugin.config.flags import FlagGroup, Needs, absolute_path, expect, flag, runtime_flag


def parse_urls(text: str | None) -> tuple[str, ...]:
    """The addresses, without a slash at the end."""
    return tuple(url.strip().rstrip("/") for url in (text or "").split(",") if url.strip())


def check_urls(option: str, urls: Sequence[str], *, key_option: str, travels: str) -> None:
    """Refuse addresses that are invalid, hold a secret or are doubled; warn of plain HTTP.

    option: the flag that names them; key_option: that of their API key; travels: what they get
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
    """Refuse what cannot be the name of an environment variable; it may be the key itself."""
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


#: An engine of the user's own may read any flag.
_SERVERS = Needs(
    "--rollout-engine http, sglang or vllm_server",
    lambda config: config.server_dialect is not None or config.rollout_engine not in ENGINES,
)


@dataclass(frozen=True)
class ServerFlags(FlagGroup):
    title: ClassVar[str] = "rollout servers (--rollout-engine http)"

    rollout_url: str | None = runtime_flag(
        None, "URLs of inference servers, separated by commas; requests are balanced over them"
    )
    rollout_server: Literal["vllm", "sglang"] = flag(
        "vllm",
        "server software",
        needs=Needs(
            "--rollout-engine http",
            lambda config: (
                config.engine_traits.asks_servers or config.rollout_engine not in ENGINES
            ),
        ),
    )
    rollout_weights_dir: str | None = runtime_flag(
        None,
        "directory that job and servers share, through which the servers get new weights; none = a "
        "temporary one for servers that the job starts",
        path=absolute_path,
    )
    rollout_request_timeout: float | None = runtime_flag(
        None,
        "seconds a server may take for one response, to its last byte; none = 600, or more where "
        "--max-response-length at --least-response-speed takes longer",
        above=0,
        needs=_SERVERS,
    )
    least_response_speed: float = runtime_flag(
        10.0,
        "tokens a second that a response is generated with at least; what is slower counts as hung",
        above=0,
    )
    rollout_request_retries: int = runtime_flag(
        3,
        "retries of a response before it counts as failed",
        at_least=0,
        needs=_SERVERS,
    )
    max_answer_bytes: int = flag(
        16 << 20,
        "largest answer of a server, decompressed; at most 16 are read at a time",
        at_least=1 << 10,
    )
    rollout_api_key_env: str | None = runtime_flag(
        None, "environment variable with the servers' API key, which is sent as a bearer token"
    )

    def check(self) -> None:
        check_key_variable("--rollout-api-key-env", self.rollout_api_key_env)
        check_urls(
            "--rollout-url",
            self.rollout_urls,
            key_option="--rollout-api-key-env",
            travels="prompts, responses, control of the weights",
        )

    @property
    def rollout_urls(self) -> tuple[str, ...]:
        """The servers' addresses, without a slash at the end."""
        return parse_urls(self.rollout_url)
