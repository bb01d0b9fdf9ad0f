"""The settings table: values, layers, files, listeners, and the page made from it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.config import (
    BROKER_SETTINGS,
    GROUP_SETTINGS,
    SETTINGS,
    TOPIC_SETTINGS,
    BrokerConfig,
    ConfigSource,
    Kind,
    Listener,
    Scope,
    Update,
    describe_broker,
    describe_broker_defaults,
    describe_client_metrics,
    describe_group,
    describe_topic,
    find_setting,
    format_value,
    group_value,
    parse_properties,
    parse_value,
    topic_config,
    validate_dynamic_broker,
    validate_overrides,
)
from millrace.config.page import configuration_markdown
from millrace.config.setting import counts_by_address
from millrace.errors import ConfigError


def test_every_default_passes_its_own_rule() -> None:
    for table in SETTINGS.values():
        for setting in table.values():
            if setting.default is not None:
                text = format_value(setting.default)
                assert text is not None
                assert parse_value(setting, text) == setting.default, setting.name


def test_every_synonym_and_bound_is_a_broker_setting() -> None:
    for setting in (*TOPIC_SETTINGS.values(), *GROUP_SETTINGS.values()):
        for synonym in setting.synonyms:
            assert synonym.name in BROKER_SETTINGS
        for bound in setting.bounds or ():
            assert bound in BROKER_SETTINGS


def test_topic_defaults_are_those_of_the_derived_broker_settings() -> None:
    broker = BrokerConfig()
    for setting in TOPIC_SETTINGS.values():
        assert broker.derived(setting) == setting.default, setting.name


def test_kafkas_defaults() -> None:
    broker = BrokerConfig()
    topic = topic_config({}, broker)
    assert topic.retention_ms == 604_800_000
    assert topic.segment_bytes == 1_073_741_824
    assert topic.max_message_bytes == 1_048_588
    assert topic.cleanup_policy == ("delete",) and topic.delete and not topic.compact
    assert topic.message_timestamp_before_max_ms == 2**63 - 1
    assert topic.flush_mode == "group"
    assert broker["num.partitions"] == 1
    assert broker.get_bool("auto.create.topics.enable")
    assert broker.get_float("log.cleaner.io.buffer.load.factor") == 0.9
    assert broker.get_int("offsets.topic.num.partitions") == 50
    assert broker.get_list("group.consumer.assignors") == ("uniform", "range")


@pytest.mark.parametrize(
    ("scope", "name", "text"),
    [
        (Scope.TOPIC, "retention.ms", "abc"),
        (Scope.TOPIC, "retention.ms", "-2"),
        (Scope.TOPIC, "retention.ms", "1_000"),
        (Scope.TOPIC, "retention.ms", "٣"),
        (Scope.TOPIC, "retention.ms", "9223372036854775808"),
        (Scope.TOPIC, "retention.ms", "9" * 5000),
        (Scope.TOPIC, "retention.ms", ""),
        (Scope.TOPIC, "segment.bytes", "1048575"),
        (Scope.TOPIC, "segment.bytes", "2147483648"),
        (Scope.TOPIC, "cleanup.policy", "shred"),
        (Scope.TOPIC, "cleanup.policy", "delete,delete"),
        (Scope.TOPIC, "cleanup.policy", "delete,"),
        (Scope.TOPIC, "preallocate", "yes"),
        (Scope.TOPIC, "min.cleanable.dirty.ratio", "1.5"),
        (Scope.TOPIC, "min.cleanable.dirty.ratio", "nan"),
        (Scope.TOPIC, "compression.type", "brotli"),
        (Scope.TOPIC, "compression.gzip.level", "0"),
        (Scope.TOPIC, "remote.storage.enable", "true"),
        (Scope.TOPIC, "flush.mode", "never"),
        (Scope.TOPIC, "leader.replication.throttled.replicas", "1-2"),
        (Scope.GROUP, "share.auto.offset.reset", "by_duration:"),
        (Scope.BROKER, "log.retention.hours", "0"),
        (Scope.BROKER, "listeners", ""),
        (Scope.BROKER, "max.connections.per.ip.overrides", "localhost:5"),
        (Scope.BROKER, "max.connections.per.ip.overrides", "127.0.0.1"),
        (Scope.BROKER, "max.connections.per.ip.overrides", "127.0.0.1:-1"),
        (Scope.BROKER, "max.connections.per.ip.overrides", "127.0.0.1:many"),
        (Scope.BROKER, "group.coordinator.rebalance.protocols", "consumer"),
        (Scope.BROKER, "group.coordinator.rebalance.protocols", "classic,other"),
    ],
)
def test_bad_values_are_refused_in_one_line(scope: Scope, name: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_value(find_setting(scope, name), text)
    message = str(caught.value)
    assert message.startswith(name) and "\n" not in message and len(message) < 400


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("cleanup.policy", " compact , delete ", ("compact", "delete")),
        ("cleanup.policy", "", ()),
        ("preallocate", "TRUE", True),
        ("retention.ms", "-1", -1),
        ("min.cleanable.dirty.ratio", ".25", 0.25),
        ("compression.zstd.level", "-7", -7),
        ("follower.replication.throttled.replicas", "*", ("*",)),
        ("follower.replication.throttled.replicas", "0:1,1:2", ("0:1", "1:2")),
    ],
)
def test_good_values(name: str, text: str, value: object) -> None:
    assert parse_value(TOPIC_SETTINGS[name], text) == value


def test_limits_of_addresses() -> None:
    text = "127.0.0.1:5, ::1:6,[2001:DB8::0:7]:0, ::ffff:10.0.0.1:8"
    expected = {"127.0.0.1": 5, "::1": 6, "2001:db8::7": 0, "10.0.0.1": 8}
    assert counts_by_address(text) == expected
    assert counts_by_address("") == {}


def test_the_session_timeout_has_two_names() -> None:
    def session_ms(**given: str) -> int:
        return BrokerConfig({f"{name}.session.timeout.ms": value for name, value in given.items()}).session_timeout_ms

    assert session_ms() == 6000
    assert session_ms(broker="20000") == 20_000
    assert session_ms(zookeeper="7000", broker="20000") == 7000


def test_a_listener_has_limits_of_its_own_but_an_address_has_one() -> None:
    config = BrokerConfig({"listener.name.plaintext.max.connections": "7", "max.connections": "9"})
    assert config.listener_value("PLAINTEXT", "max.connections") == 7
    assert config.listener_value("OTHER", "max.connections") == 9
    for name in ("max.connections.per.ip", "max.connections.per.ip.overrides"):
        with pytest.raises(ConfigError, match="unknown broker setting"):
            BrokerConfig({f"listener.name.plaintext.{name}": "7"})


def test_secrets_do_not_appear_in_errors_or_reprs() -> None:
    setting = BROKER_SETTINGS["ssl.key.password"]
    assert setting.sensitive
    config = BrokerConfig({"ssl.key.password": "hunter2"})
    assert "hunter2" not in repr(config)
    entries = [entry for entry in describe_broker(config) if entry.name == "ssl.key.password"]
    assert entries[0].value is None and entries[0].sensitive
    assert entries[0].source is ConfigSource.STATIC_BROKER_CONFIG
    assert all(synonym.value is None for synonym in entries[0].synonyms)


def test_unknown_names_come_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"log\.retention\.hour.*did you mean log\.retention\.hours"):
        BrokerConfig({"log.retention.hour": "1"})
    with pytest.raises(ConfigError, match=r"did you mean retention\.ms"):
        validate_overrides(Scope.TOPIC, {"retention.m": "1"}, BrokerConfig())


def test_names_of_a_kraft_file_are_ignored_and_reported() -> None:
    config = BrokerConfig(
        {"process.roles": "broker,controller", "controller.quorum.voters": "1@x:9093", "node.id": "7"}
    )
    assert config.ignored == ("process.roles", "controller.quorum.voters")
    assert config.broker_id == 7


def test_kafkas_settings_without_effect_are_known_checked_and_described() -> None:
    name = "sasl.kerberos.min.time.before.relogin"
    validate_dynamic_broker({name: "58000"}, per_broker=True)
    with pytest.raises(ConfigError, match="expected a whole number"):
        validate_dynamic_broker({name: "soon"}, per_broker=True)
    with pytest.raises(ConfigError, match="only for one broker"):
        validate_dynamic_broker({name: "58000"}, per_broker=False)
    with pytest.raises(ConfigError, match="cannot change while brokers run"):
        validate_dynamic_broker({"telemetry.max.bytes": "10"}, per_broker=True)
    with pytest.raises(ConfigError, match="must be at least 1"):
        validate_dynamic_broker({"remote.log.reader.threads": "0"}, per_broker=False)
    with pytest.raises(ConfigError, match=r"unknown broker setting 'sasl\.kerberos\.min\.time'"):
        validate_dynamic_broker({"sasl.kerberos.min.time": "1"}, per_broker=True)

    broker = BrokerConfig({"metric.reporters": "com.example.Reporter"})
    assert broker.ignored == ("metric.reporters",)
    broker.apply_dynamic({}, {name: "58000"})
    entries = {entry.name: entry for entry in describe_broker(broker)}
    assert (entries[name].value, entries[name].source) == ("58000", ConfigSource.DYNAMIC_BROKER_CONFIG)
    assert entries["metric.reporters"].source is ConfigSource.STATIC_BROKER_CONFIG
    assert "no effect" in entries[name].documentation
    assert (entries["ssl.enabled.protocols"].value, entries["process.roles"].value) == ("TLSv1.2,TLSv1.3", None)
    assert "server.max.startup.time.ms" not in entries, "what is internal to Kafka is not described there either"
    assert entries["delegation.token.secret.key"].sensitive


@pytest.mark.parametrize("name", ["com.example.Ranger", "com.example.NoStandardAuthorizer", "StandardAuthorizer.Fake"])
def test_an_authorizer_that_is_not_known_is_not_ignored(name: str) -> None:
    with pytest.raises(ConfigError, match=r"authorizer\.class\.name=.*must be empty, or name"):
        BrokerConfig({"authorizer.class.name": name})


@pytest.mark.parametrize(
    "name",
    [
        "",
        "StandardAuthorizer",
        "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "kafka.security.authorizer.AclAuthorizer",
    ],
)
def test_kafkas_authorizers_are_known(name: str) -> None:
    assert BrokerConfig({"authorizer.class.name": name}).get("authorizer.class.name") == name


def test_derived_advertised_listeners_are_no_default() -> None:
    def advertised(config: BrokerConfig, told: str | None) -> tuple[str | None, ConfigSource]:
        (entry,) = [each for each in describe_broker(config, told) if each.name == "advertised.listeners"]
        return entry.value, entry.source

    derived = BrokerConfig({"listeners": "PLAINTEXT://:0"})
    assert advertised(derived, "PLAINTEXT://here:9092") == ("PLAINTEXT://here:9092", ConfigSource.STATIC_BROKER_CONFIG)
    told = BrokerConfig({"advertised.listeners": "PLAINTEXT://there:9093"})
    assert advertised(told, "PLAINTEXT://there:9093")[1] is ConfigSource.STATIC_BROKER_CONFIG


# --- layers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("static", "expected"),
    [
        ({}, 604_800_000),
        ({"log.retention.hours": "24"}, 86_400_000),
        ({"log.retention.hours": "24", "log.retention.minutes": "5"}, 300_000),
        ({"log.retention.minutes": "5", "log.retention.ms": "7"}, 7),
        ({"log.retention.hours": "-1"}, -1),
    ],
)
def test_retention_in_several_units(static: dict[str, str], expected: int) -> None:
    assert topic_config({}, BrokerConfig(static)).retention_ms == expected


def test_the_layers_of_a_topic_setting() -> None:
    broker = BrokerConfig({"log.segment.bytes": "2000000"})

    def described(overrides: dict[str, str]) -> tuple[str | None, ConfigSource, list[ConfigSource]]:
        (entry,) = [entry for entry in describe_topic(overrides, broker) if entry.name == "segment.bytes"]
        return entry.value, entry.source, [synonym.source for synonym in entry.synonyms]

    default, static = ConfigSource.DEFAULT_CONFIG, ConfigSource.STATIC_BROKER_CONFIG
    assert described({}) == ("2000000", static, [static, default])
    broker.apply_dynamic({"log.segment.bytes": "3000000"}, {})
    shared = ConfigSource.DYNAMIC_DEFAULT_BROKER_CONFIG
    assert described({}) == ("3000000", shared, [shared, static, default])
    broker.apply_dynamic({"log.segment.bytes": "3000000"}, {"log.segment.bytes": "4000000"})
    own = ConfigSource.DYNAMIC_BROKER_CONFIG
    assert described({}) == ("4000000", own, [own, shared, static, default])
    topic = ConfigSource.DYNAMIC_TOPIC_CONFIG
    assert described({"segment.bytes": "5000000"}) == ("5000000", topic, [topic, own, shared, static, default])
    broker.apply_dynamic({}, {})
    assert topic_config({}, broker).segment_bytes == 2_000_000


def test_dynamic_values_that_are_no_longer_valid_are_not_obeyed() -> None:
    broker = BrokerConfig()
    broker.apply_dynamic({"log.segment.bytes": "1", "gone.in.this.version": "x"}, {"log.retention.ms": "5"})
    assert topic_config({}, broker).segment_bytes == 1_073_741_824
    assert topic_config({}, broker).retention_ms == 5
    assert topic_config({"segment.bytes": "1"}, broker).segment_bytes == 1_073_741_824


def test_segments_can_be_made_small_for_tests() -> None:
    assert topic_config({"internal.segment.bytes": "1000"}, BrokerConfig()).segment_bytes == 1000
    assert "internal.segment.bytes" not in {entry.name for entry in describe_topic({}, BrokerConfig())}


def test_describe_lists_everything_once() -> None:
    broker = BrokerConfig()
    brokers = [entry.name for entry in describe_broker(broker)]
    assert brokers == [name for name, setting in BROKER_SETTINGS.items() if not setting.hidden]
    topics = [entry.name for entry in describe_topic({}, broker)]
    assert topics == [name for name, setting in TOPIC_SETTINGS.items() if not setting.hidden]
    for entry in describe_topic({}, broker):
        assert entry.source is ConfigSource.DEFAULT_CONFIG
        assert entry.documentation and not entry.read_only
    read_only = {entry.name for entry in describe_broker(broker) if entry.read_only}
    assert "log.dirs" in read_only and "log.retention.ms" not in read_only


def test_cluster_defaults_list_only_what_was_set() -> None:
    broker = BrokerConfig({"log.retention.ms": "9"})
    assert describe_broker_defaults(broker) == []
    broker.apply_dynamic({"log.retention.ms": "5"}, {"log.retention.ms": "6"})
    (entry,) = describe_broker_defaults(broker)
    assert (entry.name, entry.value, entry.source) == (
        "log.retention.ms", "5", ConfigSource.DYNAMIC_DEFAULT_BROKER_CONFIG,
    )  # fmt: skip


def test_dynamic_broker_settings_are_checked() -> None:
    validate_dynamic_broker({"log.retention.ms": "1"}, per_broker=False)
    validate_dynamic_broker({"ssl.keystore.location": "x"}, per_broker=True)
    for bad, per_broker in [
        ({"log.dirs": "/x"}, True),
        ({"ssl.keystore.location": "x"}, False),
        ({"log.retention.ms": "x"}, True),
        ({"no.such": "x"}, True),
    ]:
        with pytest.raises(ConfigError):
            validate_dynamic_broker(bad, per_broker=per_broker)
    assert BROKER_SETTINGS["listeners"].update is Update.READ_ONLY


def test_groups_stay_inside_the_clusters_limits() -> None:
    broker = BrokerConfig({"group.consumer.max.session.timeout.ms": "50000"})
    validate_overrides(Scope.GROUP, {"consumer.session.timeout.ms": "50000"}, broker)
    with pytest.raises(ConfigError, match="between 45000 and 50000"):
        validate_overrides(Scope.GROUP, {"consumer.session.timeout.ms": "50001"}, broker)
    assert group_value("consumer.session.timeout.ms", {"consumer.session.timeout.ms": "60000"}, broker) == 50000
    assert group_value("consumer.session.timeout.ms", {}, broker) == 45000
    assert group_value("share.isolation.level", {"share.isolation.level": "read_committed"}, broker) == "read_committed"
    (entry,) = [entry for entry in describe_group({"consumer.session.timeout.ms": "46000"}, broker)
                if entry.name == "consumer.session.timeout.ms"]  # fmt: skip
    assert entry.value == "46000" and entry.source is ConfigSource.GROUP_CONFIG
    assert [synonym.name for synonym in entry.synonyms] == [
        "consumer.session.timeout.ms", "group.consumer.session.timeout.ms",
    ]  # fmt: skip


def test_the_least_compaction_lag_does_not_exceed_the_greatest() -> None:
    least, most = "min.compaction.lag.ms", "max.compaction.lag.ms"
    validate_overrides(Scope.TOPIC, {least: "5", most: "5"}, BrokerConfig())
    with pytest.raises(ConfigError, match=r"min.compaction.lag.ms=6: must not exceed max.compaction.lag.ms, .* 5"):
        validate_overrides(Scope.TOPIC, {least: "6", most: "5"}, BrokerConfig())
    # What the topic does not say, the broker does.
    with pytest.raises(ConfigError, match="which is 5 for this topic"):
        validate_overrides(Scope.TOPIC, {least: "6"}, BrokerConfig({f"log.cleaner.{most}": "5"}))
    with pytest.raises(ConfigError, match="=6: must not exceed"):
        validate_overrides(Scope.TOPIC, {most: "5"}, BrokerConfig({f"log.cleaner.{least}": "6"}))
    with pytest.raises(ConfigError, match=r"log.cleaner.min.compaction.lag.ms=6: must not exceed .* 5"):
        BrokerConfig({f"log.cleaner.{least}": "6", f"log.cleaner.{most}": "5"})


def test_client_metrics_subscriptions() -> None:
    broker = BrokerConfig()
    validate_overrides(Scope.CLIENT_METRICS, {"match": "client_id=web.*", "interval.ms": "100"}, broker)
    for bad in (
        {"match": "shoe_size=44"},
        {"match": "client_id=("},
        {"match": "client_id=a=b"},
        {"match": "client_id="},
        {"match": "client_id"},
        {"match": "client_id=a,"},
        {"match": "client_id=(?!a)b"},  # RE2 does not look ahead
        {"match": "client_id=" + "a" * 2000},
        {"metrics": "a,,b"},
        {"interval.ms": "99"},
        {"interval.ms": "3600001"},
        {"interval.ms": "soon"},
        {"metric": "a"},
    ):
        with pytest.raises(ConfigError):
            validate_overrides(Scope.CLIENT_METRICS, bad, broker)
    entries = {entry.name: entry for entry in describe_client_metrics({"metrics": "a,b"}, broker)}
    assert entries["metrics"].value == "a,b" and entries["metrics"].source is ConfigSource.CLIENT_METRICS_CONFIG
    assert entries["interval.ms"].source is ConfigSource.DEFAULT_CONFIG


def test_typed_access_refuses_the_wrong_type() -> None:
    broker = BrokerConfig()
    for wrong in (
        lambda: broker.get_int("log.dirs"),
        lambda: broker.get_int("auto.create.topics.enable"),
        lambda: broker.get_bool("num.partitions"),
        lambda: broker.get_str("num.partitions"),
        lambda: broker.get_list("num.partitions"),
    ):
        with pytest.raises(TypeError):
            wrong()
    with pytest.raises(KeyError):
        broker.get("no.such.setting")


# --- files ------------------------------------------------------------------------------------------------------------


def test_properties_syntax() -> None:
    text = r"""
# a comment
! another

  plain=value
colon : value two
blank three
empty=
only
continued=a,\
    b,\
    c
back\ slash\=name=x\ty
uni=\u00e9\\
url=http://x:1/?a=b"""
    assert parse_properties(text) == {
        "plain": "value",
        "colon": "value two",
        "blank": "three",
        "empty": "",
        "only": "",
        "continued": "a,b,c",
        "back slash=name": "x\ty",
        "uni": "é\\",
        "url": "http://x:1/?a=b",
    }
    assert parse_properties("a=1\r\nb=2\rc=3\\") == {"a": "1", "b": "2", "c": "3"}
    for bad in ("=x", "a=\\u12"):
        with pytest.raises(ConfigError, match="line 1"):
            parse_properties(bad)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.text(min_size=1, max_size=8), st.text(max_size=12), max_size=4))
def test_properties_round_trip(values: dict[str, str]) -> None:
    def escaped(text: str) -> str:
        return "".join(f"\\u{ord(c):04x}" if c.isalnum() and ord(c) < 0x10000 else _escaped(c) for c in text)

    def _escaped(character: str) -> str:
        names = {"\n": "\\n", "\r": "\\r", "\t": "\\t", "\f": "\\f"}
        return names.get(character, character if ord(character) > 0x7F else "\\" + character)

    text = "\n".join(f"{escaped(name)}={escaped(value)}" for name, value in values.items())
    assert parse_properties(text) == values


def test_a_file_with_overrides(tmp_path: Path) -> None:
    path = tmp_path / "server.properties"
    path.write_bytes("broker.id=3\nbroker.rack=caf\xe9\nlog.dirs=/a, /b\n".encode("latin-1"))
    config = BrokerConfig.load(path, {"broker.id": "4"})
    assert (config.broker_id, config.rack, config.log_dirs) == (4, "caf\xe9", ("/a", "/b"))
    assert BrokerConfig.load(None, {"log.dir": "/c"}).log_dirs == ("/c",)
    with pytest.raises(ConfigError, match=r"log\.dirs is not set"):
        _ = BrokerConfig.load().log_dirs
    with pytest.raises(ConfigError, match="cannot read"):
        BrokerConfig.load(tmp_path / "missing.properties")


# --- listeners --------------------------------------------------------------------------------------------------------


def test_listeners() -> None:
    config = BrokerConfig(
        {
            "listeners": "PLAINTEXT://:0,INSIDE://[::1]:9093",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,INSIDE:PLAINTEXT",
            "advertised.listeners": "PLAINTEXT://example.org:19092",
        }
    )
    inside = Listener("INSIDE", "PLAINTEXT", "::1", 9093)
    assert config.listeners == (Listener("PLAINTEXT", "PLAINTEXT", "", 0), inside)
    assert config.advertised_listeners == (Listener("PLAINTEXT", "PLAINTEXT", "example.org", 19092), inside)
    assert str(inside) == "INSIDE://[::1]:9093"


@pytest.mark.parametrize(
    "values",
    [
        {"listeners": "localhost:9092"},
        {"listeners": "PLAINTEXT://localhost"},
        {"listeners": "PLAINTEXT://localhost:70000"},
        {"listeners": "PLAINTEXT://a:1,PLAINTEXT://b:2"},
        {"listeners": "NOBODY://:9092"},
        {"listeners": "INSIDE://:9092", "listener.security.protocol.map": "INSIDE:TLS"},
        {"listener.security.protocol.map": "PLAINTEXT"},
        {
            "advertised.listeners": "OTHER://a:1",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,OTHER:PLAINTEXT",
        },
        {"advertised.listeners": "PLAINTEXT://0.0.0.0:9092"},
        {"advertised.listeners": "PLAINTEXT://:9092"},
        {"listeners": "A://h:1,B://h:1", "listener.security.protocol.map": "A:PLAINTEXT,B:PLAINTEXT"},
    ],
)
def test_bad_listeners(values: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        BrokerConfig(values)


# --- documentation ----------------------------------------------------------------------------------------------------


def test_the_listener_of_brokers_is_named_in_one_of_two_ways() -> None:
    listeners = {
        "listeners": "INNER://:9092,PLAINTEXT://:9093",
        "listener.security.protocol.map": "INNER:PLAINTEXT,PLAINTEXT:PLAINTEXT",
    }
    by_name, by_protocol = {"inter.broker.listener.name": "INNER"}, {"security.inter.broker.protocol": "PLAINTEXT"}
    assert BrokerConfig(listeners).inter_broker_listener == "INNER"
    assert BrokerConfig({**listeners, **by_name}).inter_broker_listener == "INNER"
    assert BrokerConfig({**listeners, **by_protocol}).inter_broker_listener == "PLAINTEXT"
    for wrong in ({**by_name, **by_protocol}, {"security.inter.broker.protocol": "SASL_SSL"}):
        with pytest.raises(ConfigError, match=r"security\.inter\.broker\.protocol"):
            BrokerConfig({**listeners, **wrong})


def test_the_checked_in_page_is_current() -> None:
    page = Path(__file__).parents[2] / "docs" / "configuration.md"
    assert page.read_text(encoding="utf-8") == configuration_markdown(), "run `make docs` > docs/configuration.md"


def test_documentation_fits_a_table_row() -> None:
    for table in SETTINGS.values():
        for setting in table.values():
            assert setting.doc.endswith(".") or "..." in setting.doc or setting.doc.endswith("*"), setting.name
            assert "|" not in setting.doc and "\n" not in setting.doc
    assert Kind.PASSWORD in {setting.kind for setting in BROKER_SETTINGS.values()}
