"""Who asks: the holders of keys, what each has used and may use, and whose part of the prefix cache is whose.

Without keys everybody is one nameless tenant. Knows settings and keys; no HTTP, and no engine.
"""

import hmac
import math
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ssd_serve.server.access.keys import (
    OPERATOR,
    Holder,
    Keyring,
    KeysFile,
    KnownKey,
    warn_of_weak,
)
from ssd_serve.server.access.rates import Bucket, Clock
from ssd_serve.server.errors import ApiError
from ssd_serve.base.settings import Settings

RATE_HEADERS = tuple(
    f"x-ratelimit-{what}-{limit}"
    for what in ("limit", "remaining", "reset")
    for limit in ("requests", "tokens")
)
"""OpenAI's names of the headers that tell a client its limits."""


@dataclass(slots=True)
class Used:
    """What a tenant has used, and how often each limit refused it."""

    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    over_requests: int = 0
    over_tokens: int = 0


class Tenant:
    """One holder, under however many keys. `private`: finds no text of others."""

    def __init__(self, name: str, private: bool) -> None:
        self.name = name
        self.private = private
        self.used = Used()
        self._requests: Bucket | None = None
        self._tokens: Bucket | None = None

    def limit(self, requests: int | None, tokens: int | None, clock: Clock) -> None:
        """Set limits a minute; what was used before still counts."""
        self._requests = _limited(self._requests, requests, clock)
        self._tokens = _limited(self._tokens, tokens, clock)

    def begin_request(self) -> None:
        """Count a request. Raises the 429 that says when the next one may come."""
        self._require_room()
        self.used.requests += 1
        if self._requests is not None:
            self._requests.take(1)

    def begin_prompt(self, tokens: int) -> None:
        """Charge a prompt that the engine is about to be given. Raises 429 where others used the tokens up
        since the request began."""
        self._require_tokens()
        self.used.prompt_tokens += tokens
        if self._tokens is not None:
            self._tokens.take(tokens)

    def output(self, tokens: int) -> None:
        """Charge output, which is never cut off."""
        self.used.output_tokens += tokens
        if self._tokens is not None:
            self._tokens.take(tokens)

    def headers(self) -> dict[str, str]:
        """What a client is told about its limits, under OpenAI's names."""
        found: dict[str, str] = {}
        for limit, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket is not None:
                found[f"x-ratelimit-limit-{limit}"] = str(bucket.per_minute)
                found[f"x-ratelimit-remaining-{limit}"] = str(bucket.left)
                found[f"x-ratelimit-reset-{limit}"] = f"{bucket.refill_s:.3f}s"
        return found

    def _require_room(self) -> None:
        if self._requests is not None and self._requests.level < 1.0:
            self.used.over_requests += 1
            raise self._too_much("requests", self._requests)
        self._require_tokens()

    def _require_tokens(self) -> None:
        if self._tokens is not None and self._tokens.level < 1.0:
            self.used.over_tokens += 1
            raise self._too_much("tokens", self._tokens)

    def _too_much(self, limit: str, bucket: Bucket) -> ApiError:
        wait_s = max(1, math.ceil(bucket.wait_s()))
        whose = f"the key '{self.name}'" if self.name else "this server"
        return ApiError(
            429,
            f"{whose} has a limit of {bucket.per_minute} {limit} a minute; try again in {wait_s} s",
            kind="rate_limit_error",
            code="rate_limit_exceeded",
            headers={"Retry-After": str(wait_s), **self.headers()},
        )


def _limited(bucket: Bucket | None, per_minute: int | None, clock: Clock) -> Bucket | None:
    if per_minute is None:
        return None
    if bucket is None:
        return Bucket(per_minute, clock)
    bucket.per_minute = per_minute
    return bucket


class Tenants:
    """All of them. The file of keys is read here, and again when it changes."""

    def __init__(self, settings: Settings, clock: Clock = time.monotonic) -> None:
        """Raises what is wrong with the file of keys."""
        self.unknown_keys = 0
        """Requests that came without a key that is known."""
        self._settings = settings
        self._clock = clock
        self._secret = secrets.token_bytes(32)
        self._tenants: dict[str, Tenant] = {}
        own = [] if settings.api_key is None else [KnownKey(settings.api_key, Holder(OPERATOR))]
        self._file = (
            None if settings.api_keys_file is None else KeysFile(settings.api_keys_file, own, clock)
        )
        if self._file is None:
            warn_of_weak(own, None)
        entries = own if self._file is None else self._file.entries
        self.anonymous = Tenant("", private=False)
        """Whoever asks where there are no keys."""
        self._limit(self.anonymous, Holder(""))
        self._take(entries)

    @property
    def keys_needed(self) -> bool:
        """Whether a key is needed at all."""
        return bool(self._tenants)

    def all(self) -> Sequence[Tenant]:
        """Everybody who has a key now."""
        self._refresh()
        return list(self._tenants.values())

    def find(self, key: bytes) -> Tenant | None:
        """The tenant of a key; None for a key that nobody has."""
        self._refresh()
        holder = self._keyring.holder(key)
        return None if holder is None else self._tenants[holder.name]

    def salt(self, tenant: Tenant, asked: str | None) -> bytes:
        """The name of the part of the prefix cache that a request may read and feeds: empty for everybody's.
        Nobody can name the part of another key, nor guess one from this name."""
        if asked is None and not tenant.private:
            return b""
        whose = tenant.name if tenant.private else ""
        return hmac.digest(self._secret, f"{whose}\0{asked or ''}".encode("utf-8", "surrogatepass"), "sha256")

    def _refresh(self) -> None:
        if self._file is not None and self._file.changed():
            self._take(self._file.entries)

    def _take(self, entries: Sequence[KnownKey]) -> None:
        self._keyring = Keyring(entries)
        holders = {entry.holder.name: entry.holder for entry in entries}
        self._tenants = {name: self._tenants.get(name) or self._new(name) for name in holders}
        for name, holder in holders.items():
            self._limit(self._tenants[name], holder)

    def _new(self, name: str) -> Tenant:
        apart = self._settings.salt_by_key or self._settings.suffix_shared > 0
        return Tenant(name, private=name != OPERATOR and apart)

    def _limit(self, tenant: Tenant, holder: Holder) -> None:
        settings = self._settings
        tenant.limit(
            holder.requests_per_minute or settings.key_requests_per_minute,
            holder.tokens_per_minute or settings.key_tokens_per_minute,
            self._clock,
        )
