"""What one broker was told, and how a value is found."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from millrace.config.files import Listener, parse_listeners, parse_properties
from millrace.config.setting import (
    ConfigSource,
    ConfigSynonym,
    Scope,
    Setting,
    Update,
    Value,
    format_value,
    parse_value,
    shown,
    whole_number,
)
from millrace.config.table import BROKER_FAMILIES, BROKER_SETTINGS, LISTENER_PREFIX, find_setting, is_foreign
from millrace.errors import ConfigError


def validate_dynamic_broker(configs: Mapping[str, str], *, per_broker: bool) -> None:
    """Check the complete dynamic settings of one broker, or of all (`per_broker` false); ConfigError if wrong."""
    for name, text in configs.items():
        setting = find_setting(Scope.BROKER, name)
        if setting.update is Update.READ_ONLY:
            raise ConfigError(f"{name} cannot change while brokers run")
        if setting.update is Update.PER_BROKER and not per_broker:
            raise ConfigError(f"{name} can be set only for one broker, not for all")
        parse_value(setting, text)


class BrokerConfig:
    """What one broker was told: file, overrides and, on top, the dynamic settings of the cluster.

    Static values never change. Dynamic ones are replaced as a whole by `apply_dynamic`, called on the loop by the
    owner of the cluster image, so a holder of this object always reads current values.
    """

    def __init__(self, values: Mapping[str, str] | None = None) -> None:
        self._static: dict[str, str] = {}
        self.ignored: tuple[str, ...] = ()
        """Names that were given but mean nothing here (KRaft's, JMX's): worth a warning, not an error."""
        self._dynamic_default: Mapping[str, str] = {}
        self._dynamic: Mapping[str, str] = {}
        self._parsed: dict[str, Value] = {}
        ignored = []
        for name, text in (values or {}).items():
            if is_foreign(name):
                ignored.append(name)
                if name not in BROKER_SETTINGS:
                    continue
            parse_value(find_setting(Scope.BROKER, name), text)
            self._static[name] = text.strip()
        self.ignored = tuple(ignored)
        self.listeners: tuple[Listener, ...] = parse_listeners(
            self.get_list("listeners"), self.get_str("listener.security.protocol.map"), "listeners"
        )
        self.advertised_listeners: tuple[Listener, ...] = self._advertised()
        self.inter_broker_listener: str = self._inter_broker_listener()
        """The name of the listener through which brokers reach each other: the first one unless told otherwise."""
        self._check_lags()

    @classmethod
    def load(
        cls, properties_path: str | Path | None = None, overrides: Mapping[str, str] | None = None
    ) -> BrokerConfig:
        """Read a .properties file (if any) and put `overrides` on top; any mistake is a ConfigError."""
        values: dict[str, str] = {}
        if properties_path is not None:
            try:
                raw = Path(properties_path).read_bytes()
            except OSError as error:
                raise ConfigError(f"cannot read {properties_path}: {error.strerror or error}") from None
            try:
                text = raw.decode("utf-8")
            except UnicodeDecodeError:
                text = raw.decode("latin-1")  # what Java assumes
            values.update(parse_properties(text))
        values.update(overrides or {})
        return cls(values)

    def _advertised(self) -> tuple[Listener, ...]:
        entries = self.get("advertised.listeners")
        if entries is None:
            return self.listeners
        advertised = parse_listeners(entries, self.get_str("listener.security.protocol.map"), "advertised.listeners")
        names = {listener.name for listener in self.listeners}
        for listener in advertised:
            if listener.name not in names:
                raise ConfigError(f"advertised.listeners: {listener.name} is not a name in listeners")
            if listener.host in {"0.0.0.0", "::", ""}:  # noqa: S104 - refused, not bound
                raise ConfigError(f"advertised.listeners: {listener} is not an address a client can connect to")
        told = {listener.name: listener for listener in advertised}
        return tuple(told.get(listener.name, listener) for listener in self.listeners)

    def _inter_broker_listener(self) -> str:
        setting, protocol = "inter.broker.listener.name", "security.inter.broker.protocol"
        if self.is_set(protocol):
            if self.is_set(setting):
                raise ConfigError(f"{setting} and {protocol} are two ways to say the same: give one of them")
            setting = protocol
        elif not self.is_set(setting):
            return self.listeners[0].name
        name = self.get_str(setting)
        if all(listener.name != name for listener in self.listeners):
            raise ConfigError(f"{setting}: {name} is not a name in listeners")
        return name

    def _check_lags(self) -> None:
        """Topics inherit both, and each of them would be refused."""
        least_ms = self.get_int("log.cleaner.min.compaction.lag.ms")
        most_ms = self.get_int("log.cleaner.max.compaction.lag.ms")
        if least_ms > most_ms:
            raise ConfigError(
                f"log.cleaner.min.compaction.lag.ms={least_ms}: must not exceed log.cleaner.max.compaction.lag.ms, "
                f"which is {most_ms}"
            )

    # Lookups. `get` is the general one; the others say the type for the reader and for mypy.

    def get(self, name: str) -> Any:
        """The current value of the broker setting `name`; KeyError for a name that is not in the table."""
        try:
            return self._parsed[name]
        except KeyError:
            value = self._parsed[name] = self._lookup(name)
            return value

    __getitem__ = get

    def get_int(self, name: str) -> int:
        value = self.get(name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name} is not a whole number")
        return value

    def get_float(self, name: str) -> float:
        return float(self.get(name))

    def get_bool(self, name: str) -> bool:
        value = self.get(name)
        if not isinstance(value, bool):
            raise TypeError(f"{name} is not a boolean")
        return value

    def get_str(self, name: str) -> str:
        value = self.get(name)
        if not isinstance(value, str):
            raise TypeError(f"{name} is not a string")
        return value

    def get_list(self, name: str) -> tuple[str, ...]:
        value = self.get(name)
        if not isinstance(value, tuple):
            raise TypeError(f"{name} is not a list")
        return value

    def listener_value(self, listener: str, name: str, mechanism: str = "") -> Any:
        """The value of `name` for one listener: its own before everybody's, and a SASL mechanism's before those.

        `listener.name.LISTENER.MECHANISM.NAME`, `listener.name.LISTENER.NAME`, `MECHANISM.NAME`, `NAME`.
        """
        own = f"{mechanism.lower()}." if mechanism else ""
        prefix = f"{LISTENER_PREFIX}{listener.lower()}."
        for full in dict.fromkeys((f"{prefix}{own}{name}", prefix + name, own + name)):
            for layer in (self._dynamic, self._dynamic_default, self._static):
                if full in layer:
                    return parse_value(BROKER_SETTINGS[name], layer[full])
        return self.get(name)

    def is_set(self, name: str) -> bool:
        """Whether anybody gave `name` a value, statically or dynamically."""
        return name in self._static or name in self._dynamic or name in self._dynamic_default

    @property
    def broker_id(self) -> int:
        node_id = self.get("node.id")
        return self.get_int("broker.id") if node_id is None else whole_number(node_id)

    @property
    def session_timeout_ms(self) -> int:
        """The silence after which a broker is taken for dead: ZooKeeper's name for it wins over KRaft's."""
        own = self.get("broker.session.timeout.ms")
        if own is None or self.is_set("zookeeper.session.timeout.ms"):
            return self.get_int("zookeeper.session.timeout.ms")
        return whole_number(own)

    @property
    def metrics_address(self) -> tuple[str, int] | None:
        """Host and port of `metrics.listener`; None where there is none."""
        host, _, port = str(self.get("metrics.listener") or "").rpartition(":")
        return (host.strip("[]"), int(port)) if port else None

    @property
    def rack(self) -> str | None:
        rack = self.get("broker.rack")
        return str(rack) if rack else None

    @property
    def log_dirs(self) -> tuple[str, ...]:
        """Where data is kept. Nothing is assumed: in a directory that others can write to, theirs might be waiting."""
        paths: tuple[str, ...] | None = self.get("log.dirs") or self.get("log.dir")
        if not paths:
            raise ConfigError("log.dirs is not set: it says where the broker keeps its data, such as /var/lib/millrace")
        return paths

    def apply_dynamic(self, cluster_default: Mapping[str, str], own: Mapping[str, str]) -> None:
        """Replace the dynamic layers; a value that no longer passes its rule is left out, not obeyed."""
        self._dynamic_default = _obeyable(cluster_default)
        self._dynamic = _obeyable(own)
        self._parsed = {}

    def tried(self, own: Mapping[str, str]) -> BrokerConfig:
        """A copy in which this broker's own dynamic settings are these: how it would be."""
        copied = copy.copy(self)
        copied.apply_dynamic(self._dynamic_default, own)
        return copied

    def _lookup(self, name: str) -> Value:
        setting = BROKER_SETTINGS[name]
        for layer in (self._dynamic, self._dynamic_default, self._static):
            if name in layer:
                return parse_value(setting, layer[name])
        return setting.default

    def found(self, name: str) -> Iterator[ConfigSynonym]:
        """Every layer that has a value for the broker setting `name` or its siblings in other units, best first."""
        family = BROKER_FAMILIES.get(name, (name,))
        layers = (
            (self._dynamic, ConfigSource.DYNAMIC_BROKER_CONFIG),
            (self._dynamic_default, ConfigSource.DYNAMIC_DEFAULT_BROKER_CONFIG),
            (self._static, ConfigSource.STATIC_BROKER_CONFIG),
        )
        for layer, source in layers:
            for member in family:
                if member in layer:
                    hidden = BROKER_SETTINGS[member].sensitive
                    yield ConfigSynonym(member, None if hidden else layer[member], source)
        for member in family:
            setting = BROKER_SETTINGS[member]
            if setting.default is not None:
                text = None if setting.sensitive else format_value(setting.default)
                yield ConfigSynonym(member, text, ConfigSource.DEFAULT_CONFIG)

    def derived(self, setting: Setting) -> Value:
        """What this broker's settings say about a topic or group setting that has no override."""
        for synonym in setting.synonyms:  # the finest unit comes first, and only the coarsest has a default
            value = self.get(synonym.name)
            if value is not None:
                return _scaled(value, synonym.factor)
        return setting.default

    def __repr__(self) -> str:
        told = {name: shown(find_setting(Scope.BROKER, name), text) for name, text in sorted(self._static.items())}
        return f"BrokerConfig({told}, dynamic={sorted({*self._dynamic, *self._dynamic_default})})"


def _obeyable(configs: Mapping[str, str]) -> dict[str, str]:
    kept = {}
    for name, text in configs.items():
        try:
            parse_value(find_setting(Scope.BROKER, name), text)
        except ConfigError:
            continue
        kept[name] = text
    return kept


def _scaled(value: Value, factor: int) -> Value:
    if factor == 1 or not isinstance(value, int):
        return value
    return -1 if value < 0 else value * factor
