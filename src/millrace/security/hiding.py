"""What is not shown to people: settings that are secrets by their name, and passwords inside other texts. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

HIDDEN: Final = "********"
"""Instead of a secret."""
_WORDS: Final = (
    "password", "passphrase", "secret", "jaas", "token", "key.pem", "keystore.key", "oauthbearer.config",
)  # fmt: skip
_IN_ADDRESS: Final = re.compile(r"(://[^\s/:@]*):[^\s/]*@")
_ASSIGNED: Final = re.compile(r"((?:password|passwd|passphrase|secret|token)\s*=\s*)[^\s&;,]+", re.IGNORECASE)
_SHORTEST: Final = 4
"""A secret of fewer characters occurs in texts by chance."""


def is_secret(setting: str) -> bool:
    """Whether the value of a setting is not to be shown."""
    return any(word in setting.lower() for word in _WORDS)


def without_secrets(settings: Mapping[str, str]) -> dict[str, str]:
    """Settings as they may be shown: what is secret by its name is hidden, and so are passwords in addresses."""
    return {name: HIDDEN if is_secret(name) else without_passwords(value) for name, value in settings.items()}


def without_passwords(text: str, known: Iterable[str] = ()) -> str:
    """A text in which `postgresql://user:PASSWORD@host` and `password=...` have lost it, and the secrets in `known`."""
    for secret in known:
        if len(secret) >= _SHORTEST:
            text = text.replace(secret, HIDDEN)
    return _ASSIGNED.sub(rf"\1{HIDDEN}", _IN_ADDRESS.sub(rf"\1:{HIDDEN}@", text))
