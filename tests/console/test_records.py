"""The pages of records: scans, one record, what comes live, downloads, producing and sending again."""

from __future__ import annotations

import html
import json
import re
import threading
import time
from collections.abc import Iterator

import pytest

from millrace.client.settings import ClientSettings
from millrace.console.pages import records as pages
from millrace.console.records import scan, work
from millrace.console.records.found import LIST_BYTES
from millrace.console.records.producing import Outgoing, produce
from millrace.console.records.reading import read_one
from millrace.console.records.work import MAX_RUNNING, Workbench
from millrace.console.roles import Role
from millrace.console.settings import ConsoleSettings
from millrace.testing import Cluster
from support.consoles import Visitor, visiting, words

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>"
FIRST_MS = 1_700_000_000_000


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> ClientSettings:
    return ClientSettings.from_properties({"bootstrap.servers": cluster.bootstrap_servers})


@pytest.fixture(scope="module", autouse=True)
def contents(cluster: Cluster, client: ClientSettings) -> None:
    cluster.create_topic("orders", 2)
    cluster.create_topic("hostile", 1)
    cluster.create_topic("target", 3)
    produce(
        client,
        "orders",
        [
            Outgoing(b"order-%d" % number, b'{"n": %d}' % number, (("trace", b"t"),), number % 2, FIRST_MS + number)
            for number in range(250)
        ],
    )
    text = HOSTILE.encode()
    produce(client, "hostile", [Outgoing(text, text, ((HOSTILE, text),)), Outgoing(b"gone", None), Outgoing(None, b"")])


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Scans that stand still at their first batch until they are let go."""
    let_go = threading.Event()
    look = scan.Scan.check_limits

    def stand(self: scan.Scan) -> None:
        while not let_go.is_set() and not self._client.is_stopped:
            time.sleep(0.01)
        look(self)

    monkeypatch.setattr(scan.Scan, "check_limits", stand)
    monkeypatch.setattr(pages, "QUICK_S", 0.05)
    yield let_go
    let_go.set()


def next_page(text: str) -> str:
    found = re.search(r'<a href="([^"]+)" rel="next" data-page="next">', text)
    assert found is not None
    return html.unescape(found[1])


def stream(text: str) -> list[tuple[str, object]]:
    """The events of a stream."""
    return [
        (block.partition("\n")[0].removeprefix("event: "), json.loads(block.partition("data: ")[2]))
        for block in text.split("\n\n")
        if block
    ]


class TestAPageOfRecords:
    def test_the_newest_come_first_and_older_ones_follow(self, visitor: Visitor) -> None:
        answer = visitor.get("/topics/orders/records")
        text = words(answer)
        assert "A page is full" in text and "100 records" in text
        assert text.index("order-249") < text.index("order-248") < text.index("order-150")
        assert "order-149" not in text
        older = visitor.get(f"/topics/orders/records{next_page(answer.text)}")
        assert "order-149" in words(older) and "order-150" not in words(older)
        last = visitor.get(f"/topics/orders/records{next_page(older.text)}")
        assert "Read to the end" in words(last) and 'rel="next"' not in last.text

    @pytest.mark.parametrize(
        ("query", "has", "lacks"),
        [
            ("start=beginning&rows=10", "order-9", "order-10"),
            ("start=offset&at=124", "order-249", "order-247"),
            ("start=offset&at=-1&partition=1", "order-249", "order-248"),
            (f"start=time&at={FIRST_MS + 240}&until={FIRST_MS + 242}", "order-241", "order-242"),
            ("start=beginning&filter=value.n+%3D%3D+77", "order-77", "order-78"),
            ('filter=key+%3D%3D+"order-3"', "order-3", "order-30"),
            ("start=beginning&partition=0&until=2", "order-2", "order-1"),
            ("value=hex&rows=1", "7b 22 6e 22", "order-248"),
        ],
    )
    def test_what_the_address_asks_for(self, visitor: Visitor, query: str, has: str, lacks: str) -> None:
        found = visitor.get(f"/topics/orders/records?{query}").text.partition('id="found"')[2]
        assert has in found
        assert f"{lacks}<" not in found

    def test_no_match(self, visitor: Visitor) -> None:
        text = words(visitor.get("/topics/orders/records?filter=%22nowhere%22"))
        assert "No record matches" in text and "250 records" in text

    @pytest.mark.parametrize(
        ("query", "says"),
        [
            ("filter=nonsense", "'nonsense' is no field"),
            ("start=offset&at=x", "which offset?"),
            ("start=time&at=soon", "is no time"),
            ("start=nowhere", "a scan starts at one of"),
            ("partition=x", "partitions are numbers"),
            ("partition=7", "has 2 partitions, and no 7"),
            ("rows=0", "a page has 1 to 1000 records"),
            ("key=nothing", "is no format"),
            ("after=rubbish", "begin the scan anew"),
            ("after=scan:rubbish", "begin it anew"),
            ("start=live&partition=x", "partitions are numbers"),
        ],
    )
    def test_mistakes_are_explained_beside_the_form(self, visitor: Visitor, query: str, says: str) -> None:
        answer = visitor.get(f"/topics/orders/records?{query}")
        assert answer.status_code == 400
        assert says in words(answer)
        assert "<form" in answer.text

    def test_the_place_of_a_mistake(self, visitor: Visitor) -> None:
        answer = visitor.get("/topics/orders/records", params={"filter": "key == <b>"})
        assert "key == &lt;b&gt;\n       ^" in answer.text
        assert 'aria-invalid="true"' in answer.text

    def test_a_topic_that_is_not_there(self, visitor: Visitor) -> None:
        assert visitor.get("/topics/nothing/records").status_code == 404

    def test_what_a_record_holds_cannot_act(self, visitor: Visitor) -> None:
        for path in ("/topics/hostile/records", "/topics/hostile/records/0/0", "/topics/hostile/produce?from=0:0"):
            answer = visitor.get(path)
            assert answer.status_code == 200
            assert "<script>alert" not in answer.text and "<img src=x" not in answer.text
            assert "&lt;script&gt;alert(1)" in answer.text
        assert "tombstone" in visitor.get("/topics/hostile/records").text


class TestAScanThatTakesLong:
    def test_tells_how_far_it_is_and_ends(self, visitor: Visitor, slow: threading.Event) -> None:
        text = visitor.get("/topics/orders/records?start=beginning&rows=1000").text
        found = re.search(r'data-scan="([^"]+)" data-again="([^"]+)"', text)
        assert found is not None
        assert "<progress" in text and "Cancel" in text
        events, again = (html.unescape(each) for each in found.groups())
        assert "<progress" in visitor.get(again).text, "the same scan, which goes on"
        slow.set()
        told = stream(visitor.get(events).text)
        assert told[-1] == ("over", {})
        values = dict([event for event in told if event[0] == "progress"])["progress"]
        assert isinstance(values, dict) and values["matched"] == "250" and values["share"] == 1
        after = words(visitor.get(again))
        assert "Read to the end" in after and "order-249" in after

    def test_is_cancelled(self, visitor: Visitor, slow: threading.Event) -> None:
        text = visitor.get("/topics/orders/records?start=beginning&rows=1000").text
        found = re.search(r'class="button" href="([^"]+/cancel[^"]*)"', text)
        assert found is not None
        answer = visitor.get(html.unescape(found[1]))
        assert answer.status_code == 303
        assert "Cancelled" in words(visitor.get(answer.headers["location"]))

    def test_that_nobody_looks_at_ends(
        self, visitor: Visitor, slow: threading.Event, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        text = visitor.get("/topics/orders/records?start=beginning&rows=1000").text
        found = re.search(r'data-again="([^"]+)"', text)
        assert found is not None
        monkeypatch.setattr(work, "UNWATCHED_S", 0.0)
        slow.set()
        bench = benches(visitor)
        (name,) = bench._scans
        assert bench._scans[name].wait(20)
        assert "Cancelled" in words(visitor.get(html.unescape(found[1])))

    def test_there_are_not_too_many(self, visitor: Visitor, slow: threading.Event) -> None:
        for _ in range(MAX_RUNNING):
            assert visitor.get("/topics/orders/records?start=beginning&rows=1000").status_code == 200
        refused = visitor.get("/topics/orders/records?start=beginning&rows=1000")
        assert refused.status_code == 400
        assert "run already" in words(refused)
        slow.set()
        bench = benches(visitor)
        assert all(each.wait(20) for each in list(bench._scans.values()))
        assert visitor.get("/topics/orders/records?start=beginning&rows=1000").status_code == 200

    def test_of_somebody_else_is_not_found(self, visitor: Visitor) -> None:
        assert stream(visitor.get("/topics/orders/scans/unknown/events").text) == [("over", {})]

    def test_that_ends_while_its_page_is_written_is_not_half_there(
        self, visitor: Visitor, slow: threading.Event, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its end without the records that it found would be a page that nobody completes."""
        values = pages.progress_values

        def ends(progress: scan.Progress) -> dict[str, object]:
            slow.set()
            (running,) = benches(visitor)._scans.values()
            assert running.wait(10)
            return values(progress)

        monkeypatch.setattr(pages, "progress_values", ends)
        text = visitor.get("/topics/orders/records?start=beginning&rows=1000").text
        assert "data-scan=" in text


def benches(visitor: Visitor) -> Workbench:
    sessions = visitor.client.app.state.sessions  # type: ignore[attr-defined]
    bench: Workbench = pages.workbench(sessions._shared_access())
    return bench


class TestOneRecord:
    def test_in_full(self, visitor: Visitor) -> None:
        text = words(visitor.get("/topics/orders/records/1/0"))
        assert "partition 1, offset 0" in text and "order-1" in text and '{ "n": 1 }' in text and "trace t" in text
        assert "Send again" in text
        assert 'id="record"' in visitor.part("/topics/orders/records/1/0").text

    def test_as_another_format(self, visitor: Visitor) -> None:
        assert "6f 72 64 65 72" in visitor.get("/topics/orders/records/1/0?key=hex").text
        assert "not msgpack" in visitor.get("/topics/orders/records/1/0?value=msgpack").text
        assert visitor.get("/topics/orders/records/1/0?value=nothing").status_code == 400

    def test_that_is_not_there(self, visitor: Visitor) -> None:
        answer = visitor.get("/topics/orders/records/1/99999")
        assert answer.status_code == 404 and "There is no record at offset 99999" in words(answer)
        assert visitor.get("/topics/orders/records/9/0").status_code == 404

    def test_its_bytes(self, visitor: Visitor, cluster: Cluster, client: ClientSettings) -> None:
        cluster.create_topic("long", 1)
        data = bytes(range(256)) * 100
        produce(client, "long", [Outgoing(None, data)])
        answer = visitor.get("/topics/long/records/0/0/value")
        assert answer.content == data and len(data) > LIST_BYTES
        assert answer.headers["content-disposition"] == 'attachment; filename="long-0-0.value"'
        assert answer.headers["content-type"] == "application/octet-stream"
        assert visitor.get("/topics/long/records/0/0/key").status_code == 400
        assert visitor.get("/topics/long/records/0/0/other").status_code == 400

    def test_is_sent_again(self, visitor: Visitor, client: ClientSettings) -> None:
        visitor.get("/topics/hostile/records/0/0")
        text = visitor.done("/topics/hostile/records/0/0/again", target="target", to_partition="2", keep_time="yes")
        assert "Sent to target, partition 2: it is at offset 0" in text
        original, copy = read_one(client, "hostile", 0, 0), read_one(client, "target", 2, 0)
        assert original is not None and copy is not None
        assert (copy.key, copy.value, copy.headers, copy.timestamp_ms) == (
            original.key,
            original.value,
            original.headers,
            original.timestamp_ms,
        )
        assert visitor.post("/topics/hostile/records/0/99/again", target="target").status_code == 400
        assert visitor.post("/topics/hostile/records/0/0/again", target="nothing").status_code == 404


class TestDownloads:
    def test_all_matches(self, visitor: Visitor) -> None:
        answer = visitor.get("/topics/orders/download?start=beginning&rows=10&format=jsonl&filter=value.n+<+200")
        lines = [json.loads(line) for line in answer.text.splitlines()]
        assert [json.loads(line["value"])["n"] for line in lines] == list(range(200))
        assert answer.headers["content-disposition"] == 'attachment; filename="orders.jsonl"'

    def test_the_newest(self, visitor: Visitor) -> None:
        text = visitor.get("/topics/orders/download?rows=3&format=csv").text
        assert text.splitlines()[0] == "partition,offset,timestamp,time,key,value,headers"
        assert len(text.splitlines()) == 4 and "order-249" in text

    def test_mistakes(self, visitor: Visitor) -> None:
        for query in ("filter=nonsense", "format=exe", "start=live"):
            assert visitor.get(f"/topics/orders/download?{query}").status_code == 400
        assert visitor.get("/topics/nothing/download").status_code == 404

    def test_one_that_breaks_off_says_so(self, visitor: Visitor, monkeypatch: pytest.MonkeyPatch) -> None:
        def break_off(self: scan.Scan) -> None:
            self.cancel()
            self._client.rest(0)  # which ends it here

        monkeypatch.setattr(scan.Scan, "check_limits", break_off)
        lines = visitor.get("/topics/orders/download?start=beginning").text.splitlines()
        assert json.loads(lines[-1]) == {"error": "this file is not complete: the scan was cancelled"}


class TestLive:
    def test_what_comes_is_told(self, visitor: Visitor, client: ClientSettings, cluster: Cluster) -> None:
        cluster.create_topic("live", 1)
        assert 'data-tail="/topics/live/tail?start=live"' in visitor.get("/topics/live/records?start=live").text
        bench = benches(visitor)

        def write() -> None:
            deadline = time.monotonic() + 20
            while not any(each.tail.state.following for each in list(bench._tails.values())):
                assert time.monotonic() < deadline
                time.sleep(0.01)
            (at_work,) = bench._tails.values()
            assert visitor.client.get(f"/tails/{at_work.name}/pause").status_code == 204
            assert visitor.client.get(f"/tails/{at_work.name}/resume").status_code == 204
            produce(client, "live", [Outgoing(HOSTILE.encode(), b'{"new": true}')])
            while not at_work.tail.after(0):
                assert time.monotonic() < deadline
                time.sleep(0.01)
            time.sleep(pages.EVERY_S * 2)  # a page is told every so often
            at_work.tail.stop()

        writer = threading.Thread(target=write)
        writer.start()
        told = stream(visitor.client.get("/topics/live/tail?start=live").text)
        writer.join(20)
        assert told[0][0] == "begin"
        (records,) = [value for event, value in told if event == "records"]
        assert isinstance(records, list)
        assert (records[0]["key"], records[0]["value"], records[0]["offset"]) == (HOSTILE, '{"new": true}', 0)
        assert told[-1][0] == "state" and told[-1][1]["over"] is True  # type: ignore[index]
        assert bench._tails == {}

    def test_mistakes(self, visitor: Visitor) -> None:
        ((event, text),) = stream(visitor.get("/topics/orders/tail?filter=nonsense").text)
        assert event == "refused" and "is no field" in str(text)
        assert visitor.get("/tails/unknown/pause").status_code == 400


class TestProducing:
    def test_one_record(self, visitor: Visitor, client: ClientSettings) -> None:
        text = visitor.done(
            "/topics/target/produce",
            key="k",
            key_typed="text",
            value='{"a": 1}',
            value_typed="json",
            headers="h: one\nempty:\nnone\n",
            partition="0",
            timestamp=str(FIRST_MS),
        )
        assert "Sent: partition 0, offset 0" in text
        record = read_one(client, "target", 0, 0)
        assert record is not None
        assert (record.key, record.value, record.timestamp_ms) == (b"k", b'{"a": 1}', FIRST_MS)
        assert record.headers == (("h", b"one"), ("empty", b""), ("none", None))

    def test_tombstones_and_bytes(self, visitor: Visitor, client: ClientSettings) -> None:
        visitor.done("/topics/target/produce", key="00ff", key_typed="hex", value="", value_typed="null", partition="1")
        visitor.done(
            "/topics/target/produce", key="", key_typed="null", value="AP8=", value_typed="base64", partition="1"
        )
        first, second = read_one(client, "target", 1, 0), read_one(client, "target", 1, 1)
        assert first is not None and second is not None
        assert (first.key, first.value, second.key, second.value) == (b"\x00\xff", None, None, b"\x00\xff")

    def test_several(self, visitor: Visitor, client: ClientSettings, cluster: Cluster) -> None:
        cluster.create_topic("several", 1)
        lines = visitor.get("/topics/orders/download?start=beginning&filter=value.n+<+3").text
        assert "Sent 3 records to partitions 0" in visitor.done(
            "/topics/several/produce", several="yes", lines=re.sub(r'"partition": \d, ', "", lines)
        )
        record = read_one(client, "several", 0, 2)
        assert record is not None and (record.key, record.headers) == (b"order-2", (("trace", b"t"),))

    @pytest.mark.parametrize(
        ("fields", "says"),
        [
            ({"value": "{", "value_typed": "json"}, "the value is not JSON"),
            ({"key": "0", "key_typed": "hex"}, "the key is not hex"),
            ({"value": "*", "value_typed": "base64"}, "the value is not base64"),
            ({"value_typed": "other"}, "no way to write bytes"),
            ({"headers": ": x"}, "header line 1 has no name"),
            ({"partition": "x"}, "a partition is a number"),
            ({"partition": "9"}, "has 3 partitions, and no 9"),
            ({"timestamp": "soon"}, "is no time"),
            ({"several": "yes", "lines": ""}, "there is no record to send"),
            ({"several": "yes", "lines": '{"value": 1}\n[]'}, "line 2: not a JSON object"),
            ({"several": "yes", "lines": '{"key": "k"}'}, "there is no value"),
            ({"several": "yes", "lines": '{"value": 1, "x": 2}'}, "'x' is no field"),
            ({"several": "yes", "lines": '{"value": 1, "headers": [1]}'}, "headers are an object"),
            ({"several": "yes", "lines": '{"value": 1, "partition": -1}'}, "partition is a whole number"),
        ],
    )
    def test_mistakes_leave_what_was_typed(self, visitor: Visitor, fields: dict[str, str], says: str) -> None:
        answer = visitor.post("/topics/target/produce", **{"value": "kept & shown", **fields})
        assert answer.status_code == 400
        assert says in words(answer)
        if "value" not in fields:
            assert "kept &amp; shown" in answer.text

    def test_begins_with_a_record(self, visitor: Visitor) -> None:
        text = visitor.get("/topics/orders/produce?from=1:0").text
        assert 'value="order-1"' in text and "{&#34;n&#34;: 1}</textarea>" in text and "trace: t</textarea>" in text
        assert "cannot be typed" not in text
        assert visitor.get("/topics/orders/produce?from=x").status_code == 400
        assert visitor.get("/topics/orders/produce?from=1:9999").status_code == 400

    def test_says_what_a_form_cannot_carry(self, visitor: Visitor, client: ClientSettings, cluster: Cluster) -> None:
        cluster.create_topic("binary", 1)
        produce(
            client, "binary", [Outgoing(b"\xff", b"a\r\nb", (("h", b"\xff"),)), Outgoing(None, None, (("a\nb", b""),))]
        )
        text = visitor.get("/topics/binary/produce?from=0:0").text
        assert "cannot be typed as they are" in text
        assert 'value="/w=="' in text and "YQ0KYg==</textarea>" in text, "what a form would change goes as base64"
        assert "cannot be typed as they are" in visitor.get("/topics/binary/produce?from=0:1").text

    def test_a_viewer_reads_and_sends_nothing(self, cluster: Cluster) -> None:
        for settings in (
            ConsoleSettings(cluster.bootstrap_servers, default_role=Role.VIEWER),
            ConsoleSettings(cluster.bootstrap_servers, read_only=True),
        ):
            with visiting(settings) as viewer:
                assert viewer.get("/topics/orders/records").status_code == 200
                assert "Send again" not in viewer.get("/topics/orders/records/0/0").text
                assert "disabled" in viewer.get("/topics/orders/produce").text
                assert viewer.post("/topics/orders/produce", value="x").status_code == 403
                assert viewer.post("/topics/orders/records/0/0/again", target="orders").status_code == 403
