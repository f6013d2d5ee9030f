"""Whose request it is: API keys, and what each key may do.

The file holds hashes of keys, never a key::

    {"keys": [{"name": "team-a", "sha256": "9f86d0...", "requests_per_minute": 60,
               "tokens_per_minute": 100000, "concurrency": 8, "priority": 1,
               "knob": {"max_rate": 16, "default_rate": 4, "policies": ["kv-compress"]}}]}

A key is 256 random bits (`new_key`), so one SHA-256 is enough: nobody guesses what was hashed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import json
import logging
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvc_server.knob_limits import KnobLimits
from kvc_server.settings import Settings, SettingsError

log = logging.getLogger(__name__)

_PREFIX = "kvc-"
_LOOK_INTERVAL_S = 1.0
_AMOUNTS = ("requests_per_minute", "tokens_per_minute", "concurrency")
_FLAGS = frozenset({"all_queries", "explain"})  # of the knob's bounds


@dataclasses.dataclass(frozen=True)
class Tenant:
    """What one key may do.

    Attributes
    ----------
    name : what logs and metrics call it; not secret.
    namespace : in which its prompts are cached; nobody else's requests share them.
    settings : the gateway's, with the key's bounds and defaults of the knob.
    requests_per_minute, tokens_per_minute, concurrency : None is no limit. Tokens are those of
        prompts and answers, of every choice.
    priority : of its requests in the worker's queue; None leaves it to the worker.
    operator : whether it may read /metrics.
    """

    name: str
    namespace: str
    settings: Settings
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrency: int | None = None
    priority: int | None = None
    operator: bool = False


class KeyFile:
    """The keys of a file, read again when it changes; one that cannot be used changes nothing."""

    def __init__(self, path: Path, settings: Settings):
        self._path = path
        self._settings = settings
        self._stamp = self._stat()
        self._tenants = _read(path, settings)
        self._looked = time.monotonic()

    def find(self, key: str) -> Tenant | None:
        """The tenant whose key it is, in a time that does not depend on how much of it is right."""
        self._look()
        asked = digest(key)
        found = None
        for known, tenant in self._tenants.items():
            if hmac.compare_digest(known, asked):
                found = tenant
        return found

    def _look(self) -> None:
        if time.monotonic() < self._looked + _LOOK_INTERVAL_S:
            return
        self._looked = time.monotonic()
        stamp = self._stat()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._tenants = _read(self._path, self._settings)
        except SettingsError as error:
            log.error("the keys stay as they were: %s", error)
        else:
            log.info("read %d keys", len(self._tenants))

    def _stat(self) -> tuple[int, ...] | None:
        try:
            stat = self._path.stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_size, stat.st_ino


def new_key() -> str:
    """A key that nobody guesses."""
    return _PREFIX + secrets.token_urlsafe(32)


def digest(key: str) -> str:
    """What the file holds of a key, in hexadecimal."""
    return hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()


def _read(path: Path, settings: Settings) -> dict[str, Tenant]:
    """The file's tenants by their key's digest. Raises SettingsError, naming what is wrong."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise SettingsError(f"--keys: {path} cannot be read: {error}") from None
    entries = content.get("keys") if isinstance(content, dict) else None
    if not isinstance(entries, list):
        raise SettingsError(f'--keys: {path} must hold an object such as {{"keys": []}}')
    tenants: dict[str, Tenant] = {}
    for index, entry in enumerate(entries):
        where = f"--keys: {path}: keys[{index}]"
        known, tenant = _tenant(entry, settings, where)
        if known in tenants or any(tenant.name == other.name for other in tenants.values()):
            raise SettingsError(f"{where}: its name or its key is there twice")
        tenants[known] = tenant
    return tenants


def _tenant(entry: Any, settings: Settings, where: str) -> tuple[str, Tenant]:
    entry = dict(_object(entry, where))
    name, known = entry.pop("name", None), entry.pop("sha256", None)
    if not isinstance(name, str) or not name:
        raise SettingsError(f"{where}.name must be a name")
    if not isinstance(known, str) or not _is_digest(known.lower()):
        raise SettingsError(f"{where}.sha256 must be 64 hexadecimal digits: the hash of the key")
    known = known.lower()
    knob = _object(entry.pop("knob", {}), f"{where}.knob")
    for field, value in entry.items():
        _check(field, value, f"{where}.{field}")
    namespace = hashlib.sha256(f"namespace of {known}".encode()).hexdigest()[:32]
    return known, Tenant(name, namespace, _bounded(settings, knob, f"{where}.knob"), **entry)


def _check(field: str, value: Any, where: str) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if field in _AMOUNTS:
        if value is not None and not (whole and value >= 1):
            raise SettingsError(f"{where} must be a whole number of at least 1, or null")
    elif field == "priority":
        if value is not None and not whole:
            raise SettingsError(f"{where} must be a whole number, or null")
    elif field == "operator":
        if not isinstance(value, bool):
            raise SettingsError(f"{where} must be true or false")
    else:
        raise SettingsError(f"{where}: there is no such field")


def _bounded(settings: Settings, knob: Mapping[str, Any], where: str) -> Settings:
    """The gateway's settings with a key's bounds, where these are the narrower ones."""
    names = {field.name for field in dataclasses.fields(KnobLimits)}
    for field in knob:
        if field not in {"max_rate", "default_rate", *names}:
            raise SettingsError(f"{where}.{field}: there is no such bound")
    for field in _FLAGS & set(knob):
        if not isinstance(knob[field], bool):
            raise SettingsError(f"{where}.{field} must be true or false")
    try:
        limits = {name: knob[name] for name in names & set(knob)}
        if limits.get("policies") is not None:
            limits["policies"] = frozenset(limits["policies"])
        max_rate = min(settings.max_rate, knob.get("max_rate", settings.max_rate))
        return dataclasses.replace(
            settings,
            max_rate=max_rate,
            default_rate=knob.get("default_rate", min(settings.default_rate, max_rate)),
            knob_limits=settings.knob_limits.narrowed(**limits),
        )
    except (SettingsError, TypeError, ValueError) as error:
        raise SettingsError(f"{where}: {error}") from None


def _object(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise SettingsError(f"{where} must be an object")
    return value


def _is_digest(text: str) -> bool:
    return len(text) == 64 and set(text) <= set("0123456789abcdef")
