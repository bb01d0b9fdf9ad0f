"""The brokers: what each leads and keeps, its log directories, its settings; moves of replicas and how far they are."""

from __future__ import annotations

from typing import NamedTuple

from starlette.responses import Response

from millrace.admin import configs
from millrace.admin.cluster import read_cluster
from millrace.admin.log_dirs import LogDirectory, read_log_dirs, replica_sizes
from millrace.admin.moves import Moving, make_plan, moving, replicas_now, submit
from millrace.cluster.image import ClusterImage
from millrace.cluster.reassignments import Reassignment
from millrace.console.listing import listed
from millrace.console.monitor import Monitor
from millrace.console.roles import Role
from millrace.console.web import BadInput, Page, page
from millrace.console.wording import plural
from millrace.errors import ApiError, ErrorCode
from millrace.metadata.deltas import ResourceType

MOST_MOVES_SHOWN = 200


class BrokerLine(NamedTuple):
    """A broker in the list."""

    broker_id: int
    address: str
    rack: str
    is_live: bool
    is_controller: bool
    leads: int
    replicas: int
    out_of_sync: int
    size_bytes: int | None


class MoveLine(NamedTuple):
    """A partition that is being moved, and how many of its bytes have arrived."""

    move: Moving
    done_bytes: int
    whole_bytes: int


@page("/brokers")
def brokers(page: Page) -> Response:
    with page.access.client() as client:
        image = read_cluster(client)
        directories = read_log_dirs(client, image)
    sizes = replica_sizes(directories)
    moves = [MoveLine(each, *each.progress(sizes)) for each in moving(image)]
    return page.render(
        "brokers.html",
        image=image,
        lines=[_line(image, broker_id, directories) for broker_id in sorted(image.brokers)],
        directories=directories,
        moves=moves[:MOST_MOVES_SHOWN],
        more_moves=max(len(moves) - MOST_MOVES_SHOWN, 0),
        plan=None,
    )


@page("/brokers/{broker:int}")
def broker(page: Page) -> Response:
    broker_id = page.path["broker"]
    with page.access.client() as client:
        image = read_cluster(client)
        if broker_id not in image.brokers:
            raise ApiError(ErrorCode.RESOURCE_NOT_FOUND, f"There is no broker {broker_id}")
        directories = [each for each in read_log_dirs(client, image) if each.broker == broker_id]
        found = configs.read_all(client, _resource(broker_id)) if image.is_live(broker_id) else {}
    shown = page.asked("show")
    listing = listed(
        [each for each in found.values() if shown != "set" or not each.is_default],
        page.request.query_params,
        text=lambda each: f"{each.name} {each.shown}",
        columns={"name": lambda each: each.name, "source": lambda each: each.plain_source},
        keep=("show",),
    )
    return page.render(
        "broker.html",
        line=_line(image, broker_id, directories),
        directories=directories,
        listing=listing,
        only_set=shown == "set",
        own=_resource(broker_id).own_source,
    )


@page("/brokers/{broker:int}/settings", methods=["POST"], role=Role.ADMIN)
def change_broker_setting(page: Page) -> Response:
    broker_id, setting = page.path["broker"], page.field("setting").strip()
    if not setting:
        raise BadInput("give the name of a setting")
    with page.access.client() as client:
        if page.field("action") == "unset":
            configs.change(client, _resource(broker_id), {}, [setting])
            return page.go(f"/brokers/{broker_id}", good=f"{setting} is what it is by default again", show="set")
        configs.change(client, _resource(broker_id), {setting: page.field("value")})
    return page.go(f"/brokers/{broker_id}", good=f"{setting} is {page.field('value')} now", show="set")


@page("/brokers/moves", methods=["POST"], role=Role.ADMIN)
def plan_moves(page: Page) -> Response:
    """Show what would be moved, or move it."""
    with page.access.client() as client:
        image = read_cluster(client)
        plan = _plan(page, image)
        if page.field("action") == "move":
            refused = submit(client, plan) if plan else {}
            page.access.companion(Monitor, Monitor).changed()
            if refused:
                (topic, index), error = next(iter(refused.items()))
                return page.go(
                    "/brokers", bad=f"{len(refused)} of {plural(len(plan), 'move')} refused: {topic}-{index}: {error}"
                )
            return page.go("/brokers", good=f"{plural(len(plan), 'partition')} began to move")
        directories = read_log_dirs(client, image)
    return page.render(
        "brokers.html",
        image=image,
        lines=[_line(image, broker_id, directories) for broker_id in sorted(image.brokers)],
        directories=directories,
        moves=[],
        more_moves=0,
        plan=[(each, replicas_now(image, each)) for each in plan[:MOST_MOVES_SHOWN]],
        plan_size=len(plan),
        asked={name: page.field(name) for name in ("drain", "add", "topics", "factor")},
    )


@page("/brokers/moves/cancel", methods=["POST"], role=Role.ADMIN)
def cancel_moves(page: Page) -> Response:
    with page.access.client() as client:
        under_way = moving(read_cluster(client))
        refused = submit(client, [Reassignment(each.place.topic, each.place.partition, None) for each in under_way])
    page.access.companion(Monitor, Monitor).changed()
    if refused:
        return page.go(
            "/brokers", bad=f"{plural(len(refused), 'move')} could not be cancelled: {next(iter(refused.values()))}"
        )
    return page.go("/brokers", good=f"{plural(len(under_way), 'move')} cancelled")


def _plan(page: Page, image: ClusterImage) -> list[Reassignment]:
    topics = page.field("topics").replace(",", " ").split()
    factor = page.field_number("factor", 0, most=100) or None
    return make_plan(
        image, add=_numbers(page, "add"), drain=_numbers(page, "drain"), topics=topics or None, factor=factor
    )


def _numbers(page: Page, name: str) -> list[int]:
    words = page.field(name).replace(",", " ").split()
    if not all(word.isascii() and word.isdigit() for word in words):
        raise BadInput(f"brokers are given by their numbers, such as 1, 2; not '{page.field(name)[:100]}'")
    return [int(word) for word in words]


def _resource(broker_id: int) -> configs.Resource:
    return configs.Resource(ResourceType.BROKER, str(broker_id))


def _line(image: ClusterImage, broker_id: int, directories: list[LogDirectory]) -> BrokerLine:
    broker = image.brokers[broker_id]
    states = [state for _, _, state in image.partitions() if broker_id in state.replicas]
    own = [each.size_bytes for each in directories if each.broker == broker_id]
    endpoint = next(iter(broker.endpoints), None)
    return BrokerLine(
        broker_id,
        "" if endpoint is None else f"{endpoint.host}:{endpoint.port}",
        broker.rack or "",
        image.is_live(broker_id),
        image.controller_id == broker_id,
        sum(state.leader == broker_id for state in states),
        len(states),
        sum(broker_id not in state.isr for state in states),
        None if None in own else sum(each or 0 for each in own),
    )
