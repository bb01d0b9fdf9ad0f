"""JAAS lines, as Java reads them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.errors import ConfigError
from millrace.security import jaas

PLAIN = "org.apache.kafka.common.security.plain.PlainLoginModule"


@pytest.mark.parametrize(
    ("text", "options"),
    [
        (f'{PLAIN} required username="me" password="x";', {"username": "me", "password": "x"}),
        (f"{PLAIN} required username='me' password='it is \"x\"';", {"username": "me", "password": 'it is "x"'}),
        (f'{PLAIN} required\n  username=me\n  password = "a;b=c" ;', {"username": "me", "password": "a;b=c"}),
        (f'{PLAIN} REQUIRED user_a.b-c@d="1" user_é="2"', {"user_a.b-c@d": "1", "user_é": "2"}),
        (f"{PLAIN} optional;", {}),
        (f'{PLAIN} required a="tab\\tquote\\"slash\\\\";', {"a": 'tab\tquote"slash\\'}),
        (f'{PLAIN} required a="" b=c/d;', {"a": "", "b": "c/d"}),
    ],
)
def test_forms(text: str, options: dict[str, str]) -> None:
    module = jaas.parse(text)
    assert (module.name, module.options) == ("PlainLoginModule", options)


@pytest.mark.parametrize(
    "text",
    [
        "",
        ";",
        PLAIN,
        f"{PLAIN} secret",
        f"{PLAIN} required secret",
        f"{PLAIN} required a=",
        f"{PLAIN} required a==secret",
        f"{PLAIN} required =secret",
        f'{PLAIN} required a="secret',
        f"{PLAIN} required a=1; {PLAIN} required b=secret;",
        '= required a="secret"',
    ],
)
def test_what_is_none_is_refused_without_being_repeated(text: str) -> None:
    with pytest.raises(ConfigError, match=r"sasl\.jaas\.config") as caught:
        jaas.parse(text)
    assert "secret" not in str(caught.value)


def test_options_are_not_shown() -> None:
    assert "secret" not in repr(jaas.parse(f"{PLAIN} required password=secret;"))


@given(st.dictionaries(st.from_regex(r"user_[a-z0-9.@-]+", fullmatch=True), st.text(st.characters(codec="utf-8"))))
def test_whatever_is_quoted_comes_back(options: dict[str, str]) -> None:
    quoted = {name: value.replace("\\", "\\\\").replace('"', '\\"') for name, value in options.items()}
    text = f"{PLAIN} required " + " ".join(f'{name}="{value}"' for name, value in quoted.items()) + ";"
    assert jaas.parse(text).options == options
