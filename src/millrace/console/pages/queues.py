"""Queues (share groups): how far each is, who reads, its settings, and its dead letters, which can be sent again."""

from __future__ import annotations

from typing import Final, NamedTuple

from starlette.responses import Response

from millrace.admin import configs
from millrace.admin import queues as administration
from millrace.admin.groups import SHARE, GroupView
from millrace.admin.overview import GroupRow
from millrace.admin.topics import chosen_partitions
from millrace.admin.words import Sum
from millrace.client.cluster import ClusterClient
from millrace.console import letters
from millrace.console.listing import listed
from millrace.console.monitor import Monitor
from millrace.console.pages.groups import target_of
from millrace.console.records.producing import InputError
from millrace.console.web import BadInput, Page, page
from millrace.console.wording import plural, segment
from millrace.errors import ApiError, ErrorCode
from millrace.model import TopicPartition

MOST_REPLAYED: Final = 100


class QueueLine(NamedTuple):
    """A queue in the list."""

    queue: GroupRow
    lag: Sum | None
    topics: int


@page("/queues")
def queues(page: Page) -> Response:
    view = page.access.companion(Monitor, Monitor).look()
    rows = [
        QueueLine(each, view.group_lags.get(each.name), len({one.topic for one in view.commits.get(each.name, ())}))
        for each in (view.groups.rows if view.groups else ())
        if each.type == SHARE
    ]
    listing = listed(
        rows,
        page.request.query_params,
        text=lambda line: f"{line.queue.name} {line.queue.state}",
        columns={
            "name": lambda line: line.queue.name,
            "state": lambda line: line.queue.state,
            "topics": lambda line: line.topics,
            "lag": lambda line: None if line.lag is None else line.lag.known,
        },
    )
    return page.render("queues.html", listing=listing, view=view)


@page("/queues/{queue:path}/reset", methods=["POST"])
def reset_queue(page: Page) -> Response:
    """Show where a queue would begin, or have it begin there."""
    name = page.path["queue"]
    with page.access.client() as client:
        queue = administration.describe_queue(client, name)
        positions = administration.positions_of(client, name)
        topics = page.field("topics").split()
        chosen = chosen_partitions(client, topics) if topics else sorted(positions)
        if not chosen:
            raise BadInput("the queue has read nothing: name the topics that it is to be moved in")
        if page.field("to") == "by":
            raise BadInput("a queue is moved to the first record, the end, an offset or a time")
        plan = administration.plan_reset(client, chosen, target_of(page))
        if page.field("action") == "move":
            administration.execute(client, queue, plan)
            page.access.companion(Monitor, Monitor).changed()
            return page.go(f"/queues/{segment(name)}", good=f"{plural(len(plan), 'partition')} moved")
        old = {place: position.start for place, position in positions.items()}
        return _show(page, client, queue, [(place, old.get(place), new) for place, new in sorted(plan.items())])


@page("/queues/{queue:path}/settings", methods=["POST"])
def change_queue_setting(page: Page) -> Response:
    name, setting = page.path["queue"], page.field("setting").strip()
    if not setting:
        raise BadInput("give the name of a setting")
    with page.access.client() as client:
        if page.field("action") == "unset":
            administration.change_settings(client, name, {}, [setting])
            return page.go(f"/queues/{segment(name)}", good=f"{setting} is what it is by default again")
        administration.change_settings(client, name, {setting: page.field("value")})
    return page.go(f"/queues/{segment(name)}", good=f"{setting} is {page.field('value')} now")


@page("/queues/{queue:path}/delete", methods=["POST"])
def delete_queue(page: Page) -> Response:
    name = page.path["queue"]
    if page.field("name") != name:
        raise BadInput(f"type the name of the queue, {name}, to delete it and what became of its records")
    with page.access.client() as client:
        administration.delete_queue(client, name)
    page.access.companion(Monitor, Monitor).changed()
    return page.go("/queues", good=f"Queue {name} was deleted")


@page("/queues/{queue:path}/letters")
def dead_letters(page: Page) -> Response:
    name = page.path["queue"]
    with page.access.client() as client:
        queue = administration.describe_queue(client, name)
        topic = administration.dead_letter_topic(client, name)
    found = [] if topic is None else letters.newest_letters(page.access.client_settings, topic, name)
    return page.render("queue_letters.html", queue=queue, topic=topic, letters=found, shown=letters.SHOWN)


@page("/queues/{queue:path}/letters", methods=["POST"])
def replay_letters(page: Page) -> Response:
    """Send the records again that the chosen letters are about."""
    name = page.path["queue"]
    chosen = page.fields("letter")
    if not chosen:
        raise BadInput("choose the letters whose records are to be sent again")
    if len(chosen) > MOST_REPLAYED:
        raise BadInput(f"at most {MOST_REPLAYED} at a time")
    with page.access.client() as client:
        topic = administration.dead_letter_topic(client, name)
    if topic is None:
        raise BadInput(f"queue {name} has no dead-letter topic any more")
    address = f"/queues/{segment(name)}/letters"
    sent = 0
    for each in chosen:
        partition, _, offset = each.partition(":")
        if not (partition.isdigit() and offset.isdigit()):
            raise BadInput(f"'{each[:50]}' is no letter")
        try:
            letters.replay(page.access.client_settings, topic, int(partition), int(offset))
        except (InputError, ApiError) as error:
            return page.go(address, bad=f"{plural(sent, 'record')} sent again; then: {error}")
        sent += 1
    return page.go(address, good=f"{plural(sent, 'record')} sent again")


@page("/queues/{queue:path}")
def queue(page: Page) -> Response:
    name = page.path["queue"]
    with page.access.client() as client:
        try:
            found = administration.describe_queue(client, name)
        except ApiError as error:
            if error.code is ErrorCode.GROUP_ID_NOT_FOUND:
                raise ApiError(error.code, f"There is no queue {name}") from None
            raise
        return _show(page, client, found, None)


def _show(
    page: Page, client: ClusterClient, found: GroupView, plan: list[tuple[TopicPartition, int | None, int]] | None
) -> Response:
    own = configs.group(found.name)
    settings = [
        each
        for each in configs.read_all(client, own).values()
        if each.name.startswith(("share.", "errors.")) or each.source == own.own_source
    ]
    listing = listed(
        administration.read_partitions(client, found),
        page.request.query_params,
        text=lambda each: str(each.place),
        columns={"partition": lambda each: each.place, "lag": lambda each: each.lag},
    )
    return page.render(
        "queue.html",
        queue=found,
        listing=listing,
        own_settings=settings,
        own=own.own_source,
        letter_topic=administration.dead_letter_topic(client, found.name),
        plan=plan,
        asked={key: page.field(key) for key in ("to", "offset", "time", "topics")},
    )
