"""Tenants: the holders of API keys, what each has used and may use, and its part of the prefix cache.

Without keys there is one nameless tenant. A limit per minute is a bucket that fills evenly and holds a minute's
amount: a client may spend that at once and then as fast as the bucket fills. Output is charged as it comes and
may overdraw the bucket; then the next request waits longer.
"""

import hmac
import math
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ssd_serve.base.settings import Settings
from ssd_serve.server.access.keys import OPERATOR, Holder, Keyring, KeysFile, KnownKey, warn_of_weak
from ssd_serve.server.errors import ApiError

_MINUTE_S = 60.0
RATE_HEADERS = tuple(
    f"x-ratelimit-{what}-{limit}"
    for what in ("limit", "remaining", "reset")
    for limit in ("requests", "tokens")
)
"""OpenAI's names of the headers that show a client its limits."""

Clock = Callable[[], float]


class Bucket:
    """A limit of `per_minute` units; full at first."""

    def __init__(self, per_minute: int, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._per_minute = per_minute
        self._level = float(per_minute)
        self._at = clock()

    @property
    def per_minute(self) -> int:
        """The limit. A new limit leaves the level, or lowers it to the limit."""
        return self._per_minute

    @per_minute.setter
    def per_minute(self, per_minute: int) -> None:
        self._level = min(self.level, float(per_minute))
        self._per_minute = per_minute

    @property
    def level(self) -> float:
        """Units that may be taken now; negative if the bucket is overdrawn."""
        now = self._clock()
        filled = self._level + (now - self._at) * self._per_minute / _MINUTE_S
        self._level, self._at = min(float(self._per_minute), filled), now
        return self._level

    @property
    def left(self) -> int:
        """The level for clients: whole, and never negative."""
        return max(0, int(self.level))

    def take(self, amount: int) -> None:
        """Charge `amount`, even above the level."""
        self._level = self.level - amount

    def wait_s(self, level: float = 1.0) -> float:
        """Seconds until the level is reached if nothing is taken; 0 if it is."""
        return max(0.0, level - self.level) * _MINUTE_S / self._per_minute

    @property
    def refill_s(self) -> float:
        """Seconds until the bucket is full."""
        return self.wait_s(self._per_minute)


@dataclass(slots=True)
class TenantUsage:
    """Amounts that a tenant has used, and how often each limit refused it."""

    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    over_requests: int = 0
    over_tokens: int = 0


class Tenant:
    """The holder of one or more keys. `private`: has its own part of the prefix cache."""

    def __init__(self, name: str, private: bool) -> None:
        self.name = name
        self.private = private
        self.used = TenantUsage()
        self._requests: Bucket | None = None
        self._tokens: Bucket | None = None

    def limit(self, requests: int | None, tokens: int | None, clock: Clock) -> None:
        """Set limits per minute; earlier use still counts."""
        self._requests = _limited(self._requests, requests, clock)
        self._tokens = _limited(self._tokens, tokens, clock)

    def begin_request(self) -> None:
        """Count a request. Raises 429 with the time until the next one is allowed."""
        self._require_allowance()
        self.used.requests += 1
        if self._requests is not None:
            self._requests.take(1)

    def begin_prompt(self, tokens: int) -> None:
        """Charge a prompt before it is sent to the engine. Raises 429 if no tokens are left."""
        self._require_tokens()
        self.used.prompt_tokens += tokens
        if self._tokens is not None:
            self._tokens.take(tokens)

    def output(self, tokens: int) -> None:
        """Charge output tokens; a limit never ends a running request."""
        self.used.output_tokens += tokens
        if self._tokens is not None:
            self._tokens.take(tokens)

    def headers(self) -> dict[str, str]:
        """Return the rate-limit headers of an answer, with OpenAI's names."""
        found: dict[str, str] = {}
        for limit, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket is not None:
                found[f"x-ratelimit-limit-{limit}"] = str(bucket.per_minute)
                found[f"x-ratelimit-remaining-{limit}"] = str(bucket.left)
                found[f"x-ratelimit-reset-{limit}"] = f"{bucket.refill_s:.3f}s"
        return found

    def _require_allowance(self) -> None:
        if self._requests is not None and self._requests.level < 1.0:
            self.used.over_requests += 1
            raise self._limit_error("requests", self._requests)
        self._require_tokens()

    def _require_tokens(self) -> None:
        if self._tokens is not None and self._tokens.level < 1.0:
            self.used.over_tokens += 1
            raise self._limit_error("tokens", self._tokens)

    def _limit_error(self, limit: str, bucket: Bucket) -> ApiError:
        wait_s = max(1, math.ceil(bucket.wait_s()))
        subject = f"the key '{self.name}'" if self.name else "this server"
        return ApiError(
            429,
            f"{subject} has a limit of {bucket.per_minute} {limit} a minute; try again in {wait_s} s",
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
    """Tenants by key, from settings and the file of keys, which is read again when it changes."""

    def __init__(self, settings: Settings, clock: Clock = time.monotonic) -> None:
        """Raises `SettingsError` if the file of keys is invalid."""
        self.unknown_keys = 0
        """Count of requests without a known key."""
        self._settings = settings
        self._clock = clock
        self._secret = secrets.token_bytes(32)
        self._tenants: dict[str, Tenant] = {}
        own = [] if settings.api_key is None else [KnownKey(settings.api_key, Holder(OPERATOR))]
        self._file = None if settings.api_keys_file is None else KeysFile(settings.api_keys_file, own, clock)
        if self._file is None:
            warn_of_weak(own, None)
        entries = own if self._file is None else self._file.entries
        self.anonymous = Tenant("", private=False)
        self._limit(self.anonymous, Holder(""))
        self._take(entries)

    @property
    def keys_needed(self) -> bool:
        """True if requests need a key."""
        return bool(self._tenants)

    def all(self) -> Sequence[Tenant]:
        """Return all tenants that have a key now."""
        self._refresh()
        return list(self._tenants.values())

    def find(self, key: bytes) -> Tenant | None:
        """Return the tenant of a key; None for an unknown key."""
        self._refresh()
        holder = self._keyring.holder(key)
        return None if holder is None else self._tenants[holder.name]

    def salt(self, tenant: Tenant, asked: str | None) -> bytes:
        """Return the prefix-cache salt of a request: empty for the shared part of the cache.

        The salt depends on a secret, so that no client can name or guess the part of another key.
        """
        if asked is None and not tenant.private:
            return b""
        owner = tenant.name if tenant.private else ""
        return hmac.digest(self._secret, f"{owner}\0{asked or ''}".encode("utf-8", "surrogatepass"), "sha256")

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
