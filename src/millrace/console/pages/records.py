"""The records of a topic: a page of what a scan found, one record in full, what comes in live, downloads.

The address of a page says everything that is asked, so that it can be kept and passed on; opening it begins the scan.
One that is quick is there with the page, one that takes longer tells how far it is (`records.js`), and both work
without a script. Nothing here changes the cluster, but for `send_record_again`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Generator
from dataclasses import dataclass, replace
from typing import Any, Final
from urllib.parse import urlencode

from starlette.concurrency import run_in_threadpool
from starlette.responses import Response, StreamingResponse

from millrace.clock import SystemClock
from millrace.console import wording
from millrace.console.pages.topic import found_topic
from millrace.console.records import queries
from millrace.console.records.decoders import Decoded, Format, Side, Subject, decode
from millrace.console.records.download import DownloadFailed, FileFormat, download, incomplete
from millrace.console.records.filters import FilterError
from millrace.console.records.found import Found
from millrace.console.records.plan import Continuation, Limits, ScanRequest
from millrace.console.records.producing import InputError, Written, send_again
from millrace.console.records.queries import Query
from millrace.console.records.reading import read_one
from millrace.console.records.scan import Progress, State
from millrace.console.records.work import Busy, ScanAtWork, TailAtWork, Workbench
from millrace.console.sessions import Access
from millrace.console.web import BadInput, Page, events, page
from millrace.console.wording import segment
from millrace.errors import ApiError, ErrorCode

QUICK_S: Final = 0.8
"""A scan that is over by then comes with the page."""
CANCEL_S: Final = 2.0
EVERY_S: Final = 0.3
LONGEST_TOKEN: Final = 3_000
"""A longer place to go on from does not fit an address: then the scan that knows it is named."""
ENOUGH_S: Final = 0.5
"""A rate of less time than this says nothing."""
PREVIEW: Final = 300
MAX_SHOWN_BYTES: Final = 1024 * 1024
"""Of one part of a record on its own page; the rest can be downloaded."""
_OF_A_SCAN: Final = "scan:"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Part:
    """A key or a value: as it is shown, and as one line."""

    decoded: Decoded
    preview: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Line:
    """A record in a list."""

    record: Found
    key: Part
    value: Part


# --- pages ------------------------------------------------------------------------------------------------------------


@page("/topics/{topic}/records")
def records(page: Page) -> Response:
    name = page.path["topic"]
    row = found_topic(page, name)
    query = Query.of(page.request.query_params)
    values: dict[str, Any] = {
        "tab": "records",
        "name": name,
        "row": row,
        "asked": query,
        "starts": queries.STARTS,
        "formats": list(Format),
        "error": "",
        "pointer": "",
        "work": None,
        "lines": [],
        "more": "",
        "tail": "",
        "download": f"/topics/{segment(name)}/download?{urlencode(query.values)}",
        "file_formats": list(FileFormat),
    }
    try:
        if query.is_live:
            queries.tail_request(name, query)
            values["tail"] = f"/topics/{segment(name)}/tail?{urlencode(query.values)}"
        else:
            values |= _scanned(page, name, query)
    except (ValueError, Busy) as error:
        values["error"] = str(error)
        if isinstance(error, FilterError):
            values["pointer"] = f"{query.filter}\n{' ' * error.position}^"
        return page.render("records.html", status=400, **values)
    return page.render("records.html", **values)


@page("/topics/{topic}/scans/{scan}/cancel")
def cancel_scan(page: Page) -> Response:
    """It changes nothing but a scan whose name only its own page knows; who may look may also stop looking."""
    work = workbench(page.access).find_scan(page.path["scan"])
    if work is not None:
        work.scan.cancel()
        work.wait(CANCEL_S)
    query = Query.of(page.request.query_params)
    return page.go(f"/topics/{segment(page.path['topic'])}/records", **query.values, scan=page.path["scan"])


@events("/topics/{topic}/scans/{scan}/events")
async def scan_events(page: Page) -> AsyncIterator[tuple[str, Any]]:
    bench = workbench(page.access)
    while True:
        work = bench.find_scan(page.path["scan"])
        if work is None:
            yield "over", {}
            return
        work.look()
        yield "progress", progress_values(work.scan.progress)
        if work.is_over:
            yield "over", {}
            return
        await asyncio.sleep(EVERY_S)


@page("/topics/{topic}/records/{partition:int}/{offset:int}")
def record(page: Page) -> Response:
    """One record in full; a list takes the part `#record` of it when a line is opened."""
    name, partition, offset = page.path["topic"], page.path["partition"], page.path["offset"]
    found = _read(page, limit=MAX_SHOWN_BYTES)
    query = Query.of(page.request.query_params)
    try:
        line = line_of(found, name, queries.key_format(query), queries.value_format(query))
    except ValueError as error:
        raise BadInput(str(error)) from None
    return page.render(
        "record.html",
        tab="records",
        name=name,
        row=found_topic(page, name),
        line=line,
        asked=query,
        formats=list(Format),
        headers=[(_header_name(header.name), decode(Subject(header.value))) for header in found.headers],
        previous=offset - 1 if offset else None,
        following=offset + 1,
        place=f"/topics/{segment(name)}/records/{partition}/{offset}",
    )


@page("/topics/{topic}/records/{partition:int}/{offset:int}/{side}")
def record_bytes(page: Page) -> Response:
    """The key or the value as it is, as a file."""
    if page.path["side"] not in ("key", "value"):
        raise BadInput("a record has a key and a value")
    found = _read(page)
    data = found.key if page.path["side"] == "key" else found.value
    if data is None:
        raise BadInput(f"the {page.path['side']} of this record is null: there is nothing to download")
    name = f"{page.path['topic']}-{found.partition}-{found.offset}.{page.path['side']}"
    return Response(data, media_type="application/octet-stream", headers=_as_file(name))


@page("/topics/{topic}/records/{partition:int}/{offset:int}/again", methods=["POST"])
def send_record_again(page: Page) -> Response:
    source = Written(page.path["topic"], page.path["partition"], page.path["offset"])
    target = page.field("target").strip() or source.topic
    chosen = page.field("to_partition").strip()
    partition = page.field_number("to_partition", most=2**31 - 1) if chosen else None
    try:
        written = send_again(
            settings_of(page.access), source, topic=target, partition=partition, keep_time=bool(page.field("keep_time"))
        )
    except InputError as error:
        raise BadInput(str(error)) from None
    place = f"/topics/{segment(written.topic)}/records/{written.partition}/{written.offset}"
    return page.go(
        place, good=f"Sent to {written.topic}, partition {written.partition}: it is at offset {written.offset}"
    )


@page("/topics/{topic}/download")
def download_records(page: Page) -> Response:
    """All matches from where the page begins, or as many of the newest as it shows, as a file."""
    name = page.path["topic"]
    query = Query.of(page.request.query_params)
    try:
        file_format = FileFormat(page.asked("format", FileFormat.JSON_LINES))
        request = queries.scan_request(name, query, now_ms=SystemClock().wall_ms())
        limits = Limits(request.limits.matches if request.backwards else None, records=None, seconds=None)
        pieces = download(settings_of(page.access), replace(request, limits=limits), file_format)
    except ValueError as error:
        raise BadInput(str(error)) from None
    found_topic(page, name)  # while it can still be said that there is none
    return StreamingResponse(
        _completed(pieces, file_format),
        media_type=file_format.media_type,
        headers=_as_file(f"{name}{file_format.suffix}"),
    )


# --- live -------------------------------------------------------------------------------------------------------------


@events("/topics/{topic}/tail")
async def tail_events(page: Page) -> AsyncIterator[tuple[str, Any]]:
    bench = workbench(page.access)
    query = Query.of(page.request.query_params)
    try:
        request = queries.tail_request(page.path["topic"], query)
        work = await run_in_threadpool(bench.tail, request)
    except (ValueError, Busy) as error:
        yield "refused", str(error)
        return
    try:
        yield "begin", {"name": work.name}
        async for event in _followed(work, request.key_format, request.value_format):
            yield event
    finally:
        bench.end_tail(work)


async def _followed(
    work: TailAtWork, key_format: Format, value_format: Format
) -> AsyncIterator[tuple[str, dict[str, Any] | list[dict[str, Any]]]]:
    tail = work.tail
    shown, last = 0, None
    topic = tail.request.topic
    while True:
        arrived = tail.after(shown)
        if arrived:
            shown = arrived[-1].number
            yield "records", [_live_line(line_of(each.record, topic, key_format, value_format)) for each in arrived]
        if tail.state != last:
            last = tail.state
            yield (
                "state",
                {
                    "following": last.following,
                    "paused": last.paused,
                    "over": last.over,
                    "seen": wording.count(last.seen),
                    "matched": wording.count(last.matched),
                    "dropped": wording.count(last.dropped),
                    "failure": last.error,
                },
            )
            if last.over:
                return
        await asyncio.sleep(EVERY_S)


@page("/tails/{tail}/{action}")
def steer_tail(page: Page) -> Response:
    """Pause it, or go on: nothing but what one page shows."""
    work = workbench(page.access).find_tail(page.path["tail"])
    if work is None:
        raise BadInput("this live view has ended: load the page again")
    if page.path["action"] == "pause":
        work.tail.pause()
    else:
        work.tail.resume()
    return Response(status_code=204)


def _live_line(line: Line) -> dict[str, Any]:
    record = line.record
    return {
        "partition": record.partition,
        "offset": record.offset,
        "time": record.timestamp_ms,
        "moment": wording.moment(record.timestamp_ms),
        "key": line.key.preview,
        "value": line.value.preview,
    }


# --- pieces -----------------------------------------------------------------------------------------------------------


def settings_of(access: Access) -> Any:
    """What a client of this user is made with; nothing connects here."""
    return access.new_client().settings


def workbench(access: Access) -> Workbench:
    return access.companion(Workbench, lambda owner: Workbench(settings_of(owner)))


def _scanned(page: Page, name: str, query: Query) -> dict[str, Any]:
    """The scan that is asked for: one that is under way or over if the address names it, or a new one."""
    bench = workbench(page.access)
    work = bench.find_scan(page.asked("scan"))
    if work is None or work.scan.request.topic != name:
        work = bench.scan(_request(bench, page, name, query))
        work.wait(QUICK_S)
    work.look()
    request, scan = work.scan.request, work.scan
    over = work.is_over  # asked first: what is read of a scan that is over is all of it
    found = list(scan.matches)
    if scan.progress.state is State.FAILED and not found:
        raise ValueError(scan.progress.error)
    base = f"/topics/{segment(name)}"
    more = ""
    if over and scan.continuation is not None:
        more = f"?{urlencode({**query.values, 'after': _token(work, scan.continuation)})}"
    return {
        "work": work,
        "over": over,
        "backwards": request.backwards,
        "progress": scan.progress,
        "live": progress_values(scan.progress),
        "lines": [line_of(each, name, request.key_format, request.value_format) for each in found],
        "more": more,
        "events": f"{base}/scans/{work.name}/events",
        "again": f"{base}/records?{urlencode({**query.values, 'scan': work.name})}",
        "cancel": f"{base}/scans/{work.name}/cancel?{urlencode(query.values)}",
        "shown_as": urlencode({"key": query.key, "value": query.value}),
    }


def _request(bench: Workbench, page: Page, name: str, query: Query) -> ScanRequest:
    request = queries.scan_request(name, query, now_ms=SystemClock().wall_ms())
    after = page.asked("after")
    if not after:
        return request
    if not after.startswith(_OF_A_SCAN):
        return replace(request, continuation=Continuation.parse(after))
    before = bench.find_scan(after.removeprefix(_OF_A_SCAN))
    if before is None or before.scan.continuation is None or before.scan.request.topic != name:
        raise ValueError("the scan before this page is not known any more: begin it anew")
    return replace(request, continuation=before.scan.continuation)


def _token(work: ScanAtWork, continuation: Continuation) -> str:
    token = str(continuation)
    return token if len(token) <= LONGEST_TOKEN else f"{_OF_A_SCAN}{work.name}"


def progress_values(progress: Progress) -> dict[str, Any]:
    """What a page shows of a scan while it runs."""
    left = progress.seconds_left
    return {
        "state": progress.state,
        "share": round(progress.share, 4),
        "percent": f"{progress.share:.0%}",
        "records": wording.count(progress.records),
        "matched": wording.count(progress.matched),
        "bytes": wording.size(progress.size_bytes),
        "rate": f"{wording.count(round(progress.rate))}/s" if progress.elapsed_s >= ENOUGH_S else "",
        "elapsed": wording.duration(round(progress.elapsed_s, 1)),
        "left": "-" if left is None else wording.duration(max(round(left), 1)),
        "retries": progress.retries,
    }


def line_of(record: Found, topic: str, key_format: Format, value_format: Format) -> Line:
    """A record as a list or a page shows it."""
    key = Subject(record.key, topic, Side.KEY, record.value, record.key_bytes)
    value = Subject(record.value, topic, Side.VALUE, record.key, record.value_bytes)
    return Line(
        record,
        _part(key, key_format, record.key_bytes),
        _part(value, value_format, record.value_bytes),
    )


def _part(subject: Subject, chosen: Format, size_bytes: int) -> Part:
    decoded = decode(subject, chosen)
    if decoded.kind in ("null", "empty"):
        return Part(decoded, decoded.kind, size_bytes)
    data = subject.data or b""
    if decoded.kind == "bytes":
        preview = data[: PREVIEW // 8].hex(" ")
    else:
        # JSON as it was written is denser than as it is shown in full.
        text = data[: PREVIEW * 4].decode(errors="ignore") if decoded.kind in ("text", "JSON") else decoded.text
        preview = " ".join(text[: PREVIEW * 4].split())
    return Part(decoded, preview[:PREVIEW] + ("…" if len(preview) > PREVIEW else ""), size_bytes)


def _read(page: Page, **options: Any) -> Found:
    name, partition, offset = page.path["topic"], page.path["partition"], page.path["offset"]
    found = read_one(settings_of(page.access), name, partition, offset, **options)
    if found is None:
        raise ApiError(
            ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
            f"There is no record at offset {offset} of {name}, partition {partition}: "
            "it was removed or compacted away, or not written yet",
        )
    return found


def _header_name(name: str) -> str:
    return name.encode(errors="surrogateescape").decode(errors="replace")


def _as_file(name: str) -> dict[str, str]:
    # A topic's name has no character that would have to be quoted here; what is not a topic's is not found.
    safe = "".join(letter if letter.isascii() and (letter.isalnum() or letter in "._-") else "_" for letter in name)
    return {"content-disposition": f'attachment; filename="{safe}"'}


def _completed(pieces: Generator[bytes, None, None], file_format: FileFormat) -> Generator[bytes, None, None]:
    """A file that breaks off says so in its last line: half of one must not pass for the whole."""
    try:
        yield from pieces
    except DownloadFailed as failure:
        logger.warning("a download broke off: %s", failure)
        yield incomplete(file_format, str(failure))
