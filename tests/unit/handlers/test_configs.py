"""DescribeConfigs, AlterConfigs, IncrementalAlterConfigs and ListConfigResources, at every version."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from millrace.cluster.planning import AlterOp, NewTopic
from millrace.config import BROKER_SETTINGS, TOPIC_SETTINGS, ConfigSource, Kind, topic_config
from millrace.errors import ErrorCode
from millrace.handlers.configs import alter_configs, describe_configs, incremental_alter_configs, list_config_resources
from millrace.metadata.deltas import ResourceType
from millrace.security.acls import AclTable
from millrace.security.authorizer import Authorizer
from millrace.wire.messages.configs import (
    AlterConfigsRequest,
    DescribeConfigsRequest,
    IncrementalAlterConfigsRequest,
    ListConfigResourcesRequest,
)
from support.handling import Handling, deciding, handling
from support.metadata import cluster_of

TOPIC, BROKER, LOGGER = ResourceType.TOPIC, ResourceType.BROKER, ResourceType.BROKER_LOGGER
METRICS, GROUP = ResourceType.CLIENT_METRICS, ResourceType.GROUP


def resource(kind: int, name: str, *keys: str) -> DescribeConfigsRequest.DescribeConfigsResource:
    return DescribeConfigsRequest.DescribeConfigsResource(
        resource_type=kind, resource_name=name, configuration_keys=list(keys) or None
    )


async def described(on: Handling, kind: int, name: str, version: int = 4) -> dict[str, Any]:
    request = DescribeConfigsRequest(resources=[resource(kind, name)], include_synonyms=True)
    (result,) = (await on.call(describe_configs, request, version)).results
    assert result.error_code == 0, result.error_message
    return {config.name: config for config in result.configs}


async def altered(on: Handling, kind: int, name: str, *operations: tuple[str, AlterOp | int, str | None]) -> int:
    request = IncrementalAlterConfigsRequest(
        resources=[
            IncrementalAlterConfigsRequest.AlterConfigsResource(
                resource_type=kind,
                resource_name=name,
                configs=[
                    IncrementalAlterConfigsRequest.AlterableConfig(name=key, config_operation=operation, value=value)
                    for key, operation, value in operations
                ],
            )
        ]
    )
    (response,) = (await on.call(incremental_alter_configs, request, 1)).responses
    assert (response.resource_type, response.resource_name) == (kind, name)
    assert bool(response.error_message) == bool(response.error_code)
    return int(response.error_code)


@pytest.mark.parametrize("version", range(1, 5))
async def test_describe_a_topic(version: int) -> None:
    async with handling({"log.retention.hours": "24"}) as on:
        await on.controller.create_topics([NewTopic("a", configs=(("cleanup.policy", "compact"),))])
        configs = await described(on, TOPIC, "a", version)
        assert set(configs) == {name for name, setting in TOPIC_SETTINGS.items() if not setting.hidden}
        assert configs["cleanup.policy"].value == "compact"
        assert configs["cleanup.policy"].config_source == ConfigSource.DYNAMIC_TOPIC_CONFIG
        assert [(s.name, s.value, s.source) for s in configs["cleanup.policy"].synonyms] == [
            ("cleanup.policy", "compact", ConfigSource.DYNAMIC_TOPIC_CONFIG),
            ("log.cleanup.policy", "delete", ConfigSource.DEFAULT_CONFIG),
        ]
        assert configs["retention.ms"].value == "86400000"
        assert configs["retention.ms"].config_source == ConfigSource.STATIC_BROKER_CONFIG
        assert configs["segment.bytes"].value == "1073741824"
        assert configs["segment.bytes"].config_source == ConfigSource.DEFAULT_CONFIG
        if version >= 3:
            assert configs["segment.bytes"].config_type == Kind.INT
            assert configs["segment.bytes"].documentation is None


async def test_describe_what_is_asked_for() -> None:
    async with handling() as on:
        await on.controller.create_topics([NewTopic("a")])
        request = DescribeConfigsRequest(
            resources=[resource(TOPIC, "a", "retention.ms", "no.such"), resource(BROKER, "1", "log.dirs")],
            include_documentation=True,
        )
        topic, broker = (await on.call(describe_configs, request, 4)).results
        (config,) = topic.configs
        assert config.name == "retention.ms" and config.synonyms == [] and config.documentation
        assert [(config.name, config.read_only) for config in broker.configs] == [("log.dirs", True)]


async def test_describe_brokers() -> None:
    async with handling({"ssl.key.password": "hunter2", "num.partitions": "7"}) as on:
        configs = await described(on, BROKER, "1")
        assert set(configs) == {name for name, setting in BROKER_SETTINGS.items() if not setting.hidden}
        assert configs["ssl.key.password"].value is None and configs["ssl.key.password"].is_sensitive
        assert configs["num.partitions"].value == "7"
        assert configs["num.partitions"].config_source == ConfigSource.STATIC_BROKER_CONFIG
        advertised = configs["advertised.listeners"]
        assert advertised.value and advertised.value.startswith("PLAINTEXT://")
        assert advertised.config_source == ConfigSource.STATIC_BROKER_CONFIG, "derived from listeners, and no default"
        assert await described(on, BROKER, "") == {}
        relogin = "sasl.kerberos.min.time.before.relogin"
        assert await altered(on, BROKER, "1", (relogin, AlterOp.SET, "58000")) == 0
        assert (await described(on, BROKER, "1"))[relogin].value == "58000"
        assert await altered(on, BROKER, "1", (relogin, AlterOp.DELETE, None)) == 0
        assert await altered(on, BROKER, "1", ("process.roles", AlterOp.SET, "broker")) == ErrorCode.INVALID_REQUEST
        assert await altered(on, BROKER, "", ("log.retention.ms", AlterOp.SET, "5")) == 0
        assert await altered(on, BROKER, "1", ("log.retention.ms", AlterOp.SET, "6")) == 0
        defaults = await described(on, BROKER, "")
        assert {name: config.value for name, config in defaults.items()} == {"log.retention.ms": "5"}
        own = (await described(on, BROKER, "1"))["log.retention.ms"]
        assert (own.value, own.config_source) == ("6", ConfigSource.DYNAMIC_BROKER_CONFIG)
        await on.controller.create_topics([NewTopic("a")])
        inherited = (await described(on, TOPIC, "a"))["retention.ms"]
        assert (inherited.value, inherited.config_source) == ("6", ConfigSource.DYNAMIC_BROKER_CONFIG)
        assert topic_config({}, on.controller._config).retention_ms == 6


async def test_describe_groups_and_subscriptions() -> None:
    async with handling() as on:
        assert await altered(on, GROUP, "g", ("consumer.session.timeout.ms", AlterOp.SET, "46000")) == 0
        assert (await described(on, GROUP, "g"))["consumer.session.timeout.ms"].value == "46000"
        assert (await described(on, GROUP, "unheard of"))["consumer.session.timeout.ms"].value == "45000"
        assert await altered(on, METRICS, "m", ("metrics", AlterOp.SET, "a"), ("interval.ms", AlterOp.SET, "1000")) == 0
        assert await altered(on, METRICS, "m", ("metrics", AlterOp.APPEND, "b")) == 0
        assert (await described(on, METRICS, "m"))["metrics"].value == "a,b"


@pytest.mark.parametrize(
    ("kind", "name", "code"),
    [
        (TOPIC, "zz", ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
        (TOPIC, "a/b", ErrorCode.INVALID_TOPIC_EXCEPTION),
        (TOPIC, "", ErrorCode.INVALID_TOPIC_EXCEPTION),
        (BROKER, "2", ErrorCode.INVALID_REQUEST),
        (BROKER, "x", ErrorCode.INVALID_REQUEST),
        (LOGGER, "", ErrorCode.INVALID_REQUEST),
        (GROUP, "", ErrorCode.INVALID_REQUEST),
        (METRICS, "", ErrorCode.INVALID_REQUEST),
        (0, "x", ErrorCode.INVALID_REQUEST),
        (99, "x", ErrorCode.INVALID_REQUEST),
    ],
)
async def test_resources_that_cannot_be_described(kind: int, name: str, code: ErrorCode) -> None:
    async with handling() as on:
        request = DescribeConfigsRequest(resources=[resource(kind, name), resource(BROKER, "1")])
        bad, good = (await on.call(describe_configs, request, 4)).results
        assert bad.error_code == code and bad.error_message and bad.configs == []
        assert (bad.resource_type, bad.resource_name) == (kind, name)
        assert good.error_code == 0


@pytest.mark.parametrize("version", range(3))
async def test_the_old_alteration_replaces_everything(version: int) -> None:
    async with handling() as on:
        await on.controller.create_topics([NewTopic("a", configs=(("flush.mode", "os"), ("retention.ms", "5")))])
        request = AlterConfigsRequest(
            resources=[
                AlterConfigsRequest.AlterConfigsResource(
                    resource_type=TOPIC,
                    resource_name="a",
                    configs=[AlterConfigsRequest.AlterableConfig(name="retention.ms", value="6")],
                ),
                AlterConfigsRequest.AlterConfigsResource(resource_type=LOGGER, resource_name="1"),
            ],
            validate_only=True,
        )
        before = on.controller.image
        await on.call(alter_configs, request, version)
        assert on.controller.image is before
        request.validate_only = False
        response = await on.call(alter_configs, request, version)
        assert [answer.error_code for answer in response.responses] == [0, ErrorCode.INVALID_REQUEST]
        assert on.controller.image.topic_overrides("a") == {"retention.ms": "6"}


@pytest.mark.parametrize("version", range(2))
async def test_the_incremental_alteration(version: int) -> None:
    async with handling() as on:
        await on.controller.create_topics([NewTopic("a", configs=(("flush.mode", "os"),))])
        Change = IncrementalAlterConfigsRequest.AlterableConfig  # noqa: N806
        request = IncrementalAlterConfigsRequest(
            resources=[
                IncrementalAlterConfigsRequest.AlterConfigsResource(
                    resource_type=TOPIC,
                    resource_name="a",
                    configs=[
                        Change(name="retention.ms", config_operation=0, value="6"),
                        Change(name="flush.mode", config_operation=1, value=None),
                        Change(name="cleanup.policy", config_operation=2, value="compact"),
                    ],
                ),
                IncrementalAlterConfigsRequest.AlterConfigsResource(
                    resource_type=TOPIC,
                    resource_name="zz",
                    configs=[Change(name="retention.ms", config_operation=0, value="6")],
                ),
            ]
        )
        response = await on.call(incremental_alter_configs, request, version)
        assert [answer.error_code for answer in response.responses] == [0, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION]
        assert on.controller.image.topic_overrides("a") == {"retention.ms": "6", "cleanup.policy": "delete,compact"}


async def test_a_bad_setting_spoils_its_resource_only() -> None:
    async with handling() as on:
        await on.controller.create_topics([NewTopic("a")])
        code = await altered(on, TOPIC, "a", ("retention.ms", AlterOp.SET, "5"), ("flush.mode", AlterOp.SET, "x"))
        assert code == ErrorCode.INVALID_CONFIG and not on.controller.image.configs


@pytest.mark.parametrize("kind", list(ResourceType))
async def test_enormous_names_and_values_are_answered(kind: ResourceType) -> None:
    """The answer to a request at the limits of a string still fits a string."""
    huge = "x" * 32_000
    async with handling() as on:
        await on.controller.create_topics([NewTopic("a")])
        for name in ("a", "1", huge):
            for operation in AlterOp:
                assert await altered(on, kind, name, (huge, operation, None)) != 0 or operation is AlterOp.DELETE
                await altered(on, kind, name, (huge, operation, huge))
                for setting in ("retention.ms", "cleanup.policy", "log.retention.ms", "match", "metrics", "root"):
                    await altered(on, kind, name, (setting, operation, huge))
            request = DescribeConfigsRequest(resources=[resource(kind, name)])
            await on.call(describe_configs, request, 1)


async def test_a_deeply_nested_pattern_is_refused() -> None:
    async with handling() as on:
        pattern = "client_id=" + "(" * 10_000 + ")" * 10_000
        assert await altered(on, METRICS, "m", ("match", AlterOp.SET, pattern)) == ErrorCode.INVALID_CONFIG


@pytest.mark.parametrize(
    ("broker", "operations", "code"),
    [
        ("1", [("ssl.keystore.location", AlterOp.SET, "/not/there")], ErrorCode.INVALID_REQUEST),
        ("1", [("ssl.keystore.location", AlterOp.APPEND, "/not/there")], ErrorCode.INVALID_CONFIG),
        ("1", [("log.cleaner.threads", AlterOp.SET, "2")], ErrorCode.NONE),
        ("2", [("ssl.keystore.location", AlterOp.SET, "/not/there")], ErrorCode.NONE),
    ],
    ids=["own", "no-alteration", "not-of-tls", "of-another-broker"],
)
async def test_settings_of_tls_that_this_broker_cannot_use(
    broker: str, operations: list[tuple[str, AlterOp, str]], code: ErrorCode
) -> None:
    on = deciding(cluster_of(1, 2), {"listeners": "SSL://127.0.0.1:0", "ssl.keystore.location": "/not/yet"})
    assert await altered(on, BROKER, broker, *operations) == code
    config = AlterConfigsRequest.AlterableConfig(name=operations[0][0], value=operations[0][2])
    replaced = AlterConfigsRequest.AlterConfigsResource(resource_type=BROKER, resource_name=broker, configs=[config])
    (response,) = (await on.call(alter_configs, AlterConfigsRequest(resources=[replaced]), 2)).responses
    assert (response.error_code == ErrorCode.NONE) is (code == ErrorCode.NONE)


async def test_files_are_not_looked_at_for_who_may_not_alter_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.handlers.configs.check_tls", pytest.fail)
    on = deciding(cluster_of(1), {"listeners": "SSL://127.0.0.1:0"})
    on.services.authorizer = Authorizer(enabled=True, acls=AclTable)
    code = await altered(on, BROKER, "1", ("ssl.keystore.location", AlterOp.SET, "/etc/shadow"))
    assert code == ErrorCode.CLUSTER_AUTHORIZATION_FAILED


async def test_loggers() -> None:
    logger = logging.getLogger("millrace.test.configs")
    async with handling() as on:
        name = logger.name
        assert await altered(on, LOGGER, "1", (name, AlterOp.SET, "warn")) == 0
        assert logger.level == logging.WARNING
        assert (await described(on, LOGGER, "1"))[name].value == "WARN"
        assert await altered(on, LOGGER, "1", (name, AlterOp.DELETE, None)) == 0
        assert logger.level == logging.NOTSET
        assert "root" in await described(on, LOGGER, "1")
        for operation, code in [
            ((name, AlterOp.SET, "LOUD"), ErrorCode.INVALID_CONFIG),
            (("not.ours", AlterOp.SET, "INFO"), ErrorCode.INVALID_CONFIG),
            (("root", AlterOp.DELETE, None), ErrorCode.INVALID_REQUEST),
            ((name, AlterOp.APPEND, "INFO"), ErrorCode.INVALID_REQUEST),
        ]:
            assert await altered(on, LOGGER, "1", operation) == code
        assert await altered(on, LOGGER, "2", (name, AlterOp.SET, "INFO")) == ErrorCode.INVALID_REQUEST


async def test_list_resources() -> None:
    async with handling() as on:
        await on.controller.create_topics([NewTopic("b"), NewTopic("a")])
        await altered(on, GROUP, "g", ("share.isolation.level", AlterOp.SET, "read_committed"))
        await altered(on, METRICS, "m", ("metrics", AlterOp.SET, "a"))

        async def listed(version: int, *kinds: int) -> list[tuple[str, int]]:
            response = await on.call(
                list_config_resources, ListConfigResourcesRequest(resource_types=list(kinds)), version
            )
            assert response.error_code == 0
            return [(found.resource_name, found.resource_type) for found in response.config_resources]

        assert await listed(0) == [("m", METRICS)]
        assert await listed(1, TOPIC, GROUP) == [("g", GROUP), ("a", TOPIC), ("b", TOPIC)]
        assert await listed(1) == [
            ("g", GROUP), ("m", METRICS), ("1", LOGGER), ("1", BROKER), ("a", TOPIC), ("b", TOPIC),
        ]  # fmt: skip
        refused = await on.call(list_config_resources, ListConfigResourcesRequest(resource_types=[99]), 1)
        assert refused.error_code == ErrorCode.UNSUPPORTED_VERSION and not refused.config_resources
