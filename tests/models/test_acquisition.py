"""Acquisition against a model: who may hold a record, what is never given out again, and what a restart finds.

The model knows every offset by itself; the window under test keeps runs. State goes through the plans and records of
the share coordinator, so that a replay can be compared with what is live. Writes succeed, fail, or succeed without
anybody learning of it; what ran out is stored later or lost; another leader takes over at any moment, and the old one
goes on writing; retention takes records away; dead letters are copied late, and twice.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from millrace.errors import ApiError, ErrorCode
from millrace.queues.acquisition import (
    AcknowledgeBatch,
    Acknowledgement,
    AcknowledgeType,
    AcquireMode,
    Changes,
    DeadLetter,
    Limits,
    LogBatch,
    Window,
)
from millrace.queues.batches import RecordState, StateBatch, combine
from millrace.queues.state import Write
from support.share_store import Store

MEMBERS = ("a", "b", "c")
MAX_DELIVERIES = 3
LOCK_MS = 1_000


UNSEEN = (0, RecordState.AVAILABLE)


@dataclass
class Record:
    """What the model knows of an offset that can be delivered."""

    holder: str = ""
    deliveries: int = 0
    done: str = ""
    pending: Acknowledgement | None = None
    told: AcknowledgeType | None = None
    rests_until_ms: int = 0
    is_copied: bool = False
    is_accepted: bool = False
    """Whether a member was told that its acceptance counts."""
    stored: tuple[int, RecordState] = UNSEEN
    """Delivery count and state that the coordinator has."""


class Acquisition(RuleBasedStateMachine):
    @initialize(dead_letters=st.booleans(), backoff=st.sampled_from([0, 300]), max_locks=st.sampled_from([3, 20, 1000]))
    def begin(self, dead_letters: bool, backoff: int, max_locks: int) -> None:
        self.limits = Limits(
            max_locks=max_locks,
            max_deliveries=MAX_DELIVERIES,
            lock_ms=LOCK_MS,
            dead_letters=dead_letters,
            backoff_ms=backoff,
            backoff_max_ms=4 * backoff,
        )
        self.log: list[LogBatch] = []
        self.log_start = self.log_end = 0
        self.records: dict[int, Record] = {}
        self.window = Window(0, self.limits)
        self.store = Store()
        self.epoch = 0
        self.unstored: list[StateBatch] = []
        self.zombie: tuple[Window, list[Acknowledgement]] | None = None
        self.pending: list[Acknowledgement] = []
        self.letters: list[DeadLetter] = []
        self.highest_start = 0
        self.now_ms = 0
        self.produce([(4, 0), (3, 0)], True)

    # --- log ----------------------------------------------------------------------------------------------------------

    @rule(
        sizes=st.lists(st.tuples(st.integers(1, 6), st.sampled_from([0, 0, 0, 2])), min_size=1, max_size=4),
        is_deliverable=st.sampled_from([True, True, True, False]),
    )
    def produce(self, sizes: list[tuple[int, int]], is_deliverable: bool) -> None:
        for size, gap in sizes:
            first = self.log_end + gap
            self.log.append(LogBatch(first, first + size - 1, is_deliverable))
            self.log_end = first + size
            if is_deliverable:
                self.records.update({offset: Record() for offset in range(first, first + size)})

    @rule(data=st.data())
    def retention(self, data: st.DataObject) -> None:
        self.log_start = data.draw(st.integers(self.log_start, min(self.log_start + 3, self.log_end)))
        self.window.move_log_start(self.log_start)
        for offset, record in self.records.items():
            if offset < self.log_start and not record.done:
                record.done, record.holder, record.pending = "gone", "", None
            if offset < self.log_start:
                record.is_copied = True  # nobody can any more

    # --- consuming ----------------------------------------------------------------------------------------------------

    @rule(
        member=st.sampled_from(MEMBERS),
        max_records=st.integers(1, 12),
        mode=st.sampled_from(list(AcquireMode)),
        batch_size=st.integers(0, 5),
        batches=st.integers(1, 5),
    )
    def fetch(self, member: str, max_records: int, mode: AcquireMode, batch_size: int, batches: int) -> None:
        self.take(member, max_records, mode, batch_size, batches)

    def take(self, member: str, max_records: int, mode: AcquireMode, batch_size: int, batches: int) -> int:
        offset = self.window.next_fetch_offset(self.now_ms)
        if offset is None:
            assert self.window.in_flight >= self.limits.max_locks
            return 0
        read = [each for each in self.log if each.last_offset >= offset and each.last_offset >= self.log_start]
        acquired = self.window.acquire(
            member,
            read[:batches],
            fetch_offset=offset,
            max_records=max_records,
            now_ms=self.now_ms,
            batch_size=batch_size,
            mode=mode,
        )
        count = 0
        for first, last, delivery_count in acquired:
            for each in range(first, last + 1):
                count += 1
                record = self.records[each]
                assert record.holder == "", "held by two"
                assert record.done == "", "delivered after its end"
                assert not record.is_accepted, "delivered after it was accepted"
                assert record.rests_until_ms <= self.now_ms, "delivered before it had rested"
                assert record.pending is None
                record.holder = member
                record.deliveries += 1
                assert delivery_count == record.deliveries <= MAX_DELIVERIES
        assert [each.first_offset for each in acquired] == sorted(each.first_offset for each in acquired)
        if mode is AcquireMode.RECORD_LIMIT:
            assert count <= max_records
        return count

    @precondition(lambda self: any(record.holder and not record.pending for record in self.records.values()))
    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        held = [offset for offset, record in self.records.items() if record.holder and not record.pending]
        member = self.records[data.draw(st.sampled_from(held))].holder
        mine = [offset for offset in held if self.records[offset].holder == member]
        chosen = sorted(data.draw(st.sets(st.sampled_from(mine), min_size=1)))
        if data.draw(st.booleans()):
            kinds = dict.fromkeys(chosen, data.draw(st.sampled_from([AcknowledgeType.RELEASE, AcknowledgeType.REJECT])))
        else:
            kinds = {offset: data.draw(st.sampled_from(list(AcknowledgeType))) for offset in chosen}
        batches: list[AcknowledgeBatch] = []
        for offset in chosen:
            if batches and batches[-1].last_offset + 1 == offset and data.draw(st.booleans()):
                before = batches.pop()
                batches.append(AcknowledgeBatch(before.first_offset, offset, [*before.types, kinds[offset]]))
            else:
                batches.append(AcknowledgeBatch(offset, offset, [kinds[offset]]))
        self.pending.append(self.window.acknowledge(member, batches, self.now_ms))
        for offset in chosen:
            if kinds[offset] is not AcknowledgeType.RENEW:
                self.records[offset].pending = self.pending[-1]
                self.records[offset].told = kinds[offset]
        if data.draw(st.booleans()):
            self.finish_one(self.pending.pop(), "stored")

    @precondition(lambda self: self.records)
    @rule(data=st.data(), member=st.sampled_from(MEMBERS), kind=st.sampled_from(list(AcknowledgeType)))
    def acknowledge_what_is_not_held(self, data: st.DataObject, member: str, kind: AcknowledgeType) -> None:
        under_way = [offset for offset, record in self.records.items() if record.pending]
        offset = data.draw(st.sampled_from(under_way or sorted(self.records)))
        if under_way:
            member = self.records[offset].holder
        record = self.records[offset]
        if offset < self.window.start_offset or (record.holder == member and not record.pending):
            return
        with pytest.raises(ApiError) as caught:
            self.window.acknowledge(member, [AcknowledgeBatch(offset, offset, [kind])], self.now_ms)
        assert caught.value.code in {ErrorCode.INVALID_RECORD_STATE, ErrorCode.INVALID_REQUEST}

    @rule(member=st.sampled_from(MEMBERS))
    def leave(self, member: str) -> None:
        acknowledgement = self.window.release(member)
        self.pending.append(acknowledgement)
        for record in self.records.values():
            if record.holder == member and record.pending is None:
                record.pending, record.told = acknowledgement, AcknowledgeType.RELEASE

    @precondition(lambda self: self.pending)
    @rule(data=st.data(), fate=st.sampled_from(["stored", "stored", "stored", "lost", "unheard"]))
    def finish(self, data: st.DataObject, fate: str) -> None:
        self.finish_one(self.pending.pop(data.draw(st.integers(0, len(self.pending) - 1))), fate)

    def finish_one(self, acknowledgement: Acknowledgement, fate: str) -> None:
        if fate != "lost":
            self.write(acknowledgement.store)
        changes = self.window.finish(acknowledgement, is_stored=fate == "stored", now_ms=self.now_ms)
        for record in self.records.values():
            if record.pending is acknowledgement:
                record.pending = None
                if fate == "stored":
                    self.ends(record)
                    record.is_accepted = record.told is AcknowledgeType.ACCEPT
        self.carry_out(changes)

    def ends(self, record: Record) -> None:
        """The model's own idea of what an acknowledgement leads to."""
        record.holder = ""
        is_over = record.deliveries >= MAX_DELIVERIES
        if record.told is AcknowledgeType.RELEASE and not is_over and self.limits.backoff_ms:
            rest_ms = min(self.limits.backoff_ms * 2 ** (record.deliveries - 1), self.limits.backoff_max_ms)
            record.rests_until_ms = self.now_ms + rest_ms
        match record.told:
            case AcknowledgeType.ACCEPT:
                record.done = "accepted"
            case AcknowledgeType.GAP:
                record.done = "archived"
            case AcknowledgeType.REJECT:
                record.done = "dead" if self.limits.dead_letters else "archived"
            case _ if is_over:
                record.done = "dead" if self.limits.dead_letters else "archived"

    # --- time ---------------------------------------------------------------------------------------------------------

    @rule(milliseconds=st.sampled_from([1, 100, LOCK_MS // 2, LOCK_MS]))
    def wait(self, milliseconds: int) -> None:
        self.now_ms += milliseconds
        deadline = self.window.next_deadline_ms()
        changes = self.window.expire(self.now_ms)
        assert bool(changes.store) == (deadline is not None and deadline <= self.now_ms)
        self.carry_out(changes)

    @precondition(lambda self: self.letters)
    @rule(is_heard=st.sampled_from([True, True, False]))
    def copy_dead_letter(self, is_heard: bool) -> None:
        """Copy a letter; or copy it, and do not learn of it, so that it is copied again."""
        letter = self.letters[0]
        for offset in range(letter.first_offset, letter.last_offset + 1):
            self.records[offset].is_copied = True
        if is_heard:
            self.letters.pop(0)
            self.unstored += self.window.dead_lettered(letter).store

    def carry_out(self, changes: Changes) -> None:
        """What a step changed is stored some time later; whatever ran out is the model's to know by now."""
        self.letters.extend(changes.dead_letters)
        self.unstored += changes.store
        for batch in changes.store:
            for offset in range(batch.first_offset, batch.last_offset + 1):
                record = self.records[offset]
                record.told = AcknowledgeType.RELEASE
                self.ends(record)

    @precondition(lambda self: self.unstored)
    @rule()
    def store_what_ran_out(self) -> None:
        self.write([])

    def write(self, batches: list[StateBatch]) -> None:
        """One write, with everything that came up before it."""
        start = self.window.start_offset
        assert start >= self.store.snapshot.start_offset, "the stored start went back"
        together, self.unstored = [*self.unstored, *batches], []
        self.store.write(Write(0, self.epoch, start, combine((), together, start)))
        for batch in together:
            for offset in range(batch.first_offset, batch.last_offset + 1):
                record = self.records[offset]
                if record.done == "dead" and batch.state is RecordState.ARCHIVED:
                    assert record.is_copied, "archived before its letter was copied"
                record.stored = max(record.stored, (batch.delivery_count, batch.state))

    # --- failover -----------------------------------------------------------------------------------------------------

    @rule()
    def fail_over(self) -> None:
        """Another leader takes over from what is stored. The old one does not know of it."""
        self.zombie = self.window, self.pending
        self.epoch += 1
        found = self.store.read(self.epoch)
        assert self.store.replayed() == self.store.live, "a replay does not find what is live"
        live = self.window
        self.window, changes = Window.load(found.start_offset, found.batches, self.limits)
        self.letters, self.pending, self.unstored = list(changes.dead_letters), [], []
        self.window.move_log_start(self.log_start)
        loaded = {offset: run for run in self.window.runs() for offset in range(run.first, run.last + 1)}
        for offset, record in self.records.items():
            record.holder, record.pending, record.rests_until_ms = "", None, 0
            if offset < self.window.start_offset:
                record.done = record.done or "passed"
                assert record.done != "passed" or record.stored[1].is_terminal, "the start passed an open record"
                continue
            count, stored = record.stored
            run = loaded.get(offset)
            assert (RecordState.AVAILABLE if run is None else run.state) == stored
            record.done = {0: "", 2: "accepted", 3: "dead", 4: "archived"}[stored]
            if not record.done:
                record.deliveries = count
                assert count == (0 if run is None else run.delivery_count)
            assert record.done or not record.is_accepted, f"{offset} was accepted and would be delivered again"
        passed = [each for each in range(self.window.start_offset, live.start_offset) if each in self.records]
        assert not any(self.records[offset].is_accepted and not self.records[offset].done for offset in passed)
        self.highest_start = self.window.start_offset

    @precondition(lambda self: self.zombie is not None)
    @rule(data=st.data(), member=st.sampled_from(MEMBERS))
    def the_old_leader_goes_on(self, data: st.DataObject, member: str) -> None:
        """It still takes acknowledgements, and cannot store them."""
        assert self.zombie is not None
        window, pending = self.zombie
        pending.append(window.release(member))
        chosen = pending.pop(data.draw(st.integers(0, len(pending) - 1)))
        before = self.store.live
        with pytest.raises(ApiError) as caught:
            self.store.write(Write(0, self.epoch - 1, window.start_offset, chosen.store))
        assert caught.value.code is ErrorCode.FENCED_LEADER_EPOCH
        assert self.store.live == before
        window.finish(chosen, is_stored=False, now_ms=self.now_ms)

    # --- invariants ---------------------------------------------------------------------------------------------------

    @invariant()
    def the_window_is_whole(self) -> None:
        if not hasattr(self, "window"):
            return
        position = self.window.start_offset
        assert position >= self.highest_start, "the start went back"
        self.highest_start = position
        before = None
        for run in self.window.runs():
            assert run.first == position
            assert run.last >= run.first
            assert before is None or not run.continues(before), "two runs that could be one"
            assert (run.state is RecordState.ACQUIRED) == bool(run.member_id)
            position, before = run.last + 1, run
            for offset in range(run.first, run.last + 1):
                record = self.records.get(offset)
                if record is not None:
                    assert record.holder == run.member_id
        assert position == self.window.end_offset
        for offset, record in self.records.items():
            if offset < self.window.start_offset:
                assert record.done, "the start passed a record that is not done with"
                assert record.done != "dead" or record.is_copied, "the start passed a letter that was not copied"
        assert not any(run.state.is_terminal for run in list(self.window.runs())[:1])

    def teardown(self) -> None:
        """Whatever happened, patient consumers get to the end of the log, and every record has one."""
        if not hasattr(self, "window"):
            return
        while self.pending:
            self.finish_one(self.pending.pop(), "stored")
        assert self.store.replayed() == self.store.live, "a replay does not find what is live"
        for _ in range(len(self.records) * MAX_DELIVERIES + 20):
            self.wait(LOCK_MS * 4)
            while self.letters:
                self.copy_dead_letter(True)
            while self.take("a", 1000, AcquireMode.BATCH_OPTIMIZED, 0, 1000):
                held = sorted(offset for offset, record in self.records.items() if record.holder == "a")
                accepted = self.window.acknowledge(
                    "a", [AcknowledgeBatch(each, each, [AcknowledgeType.ACCEPT]) for each in held], self.now_ms
                )
                self.write(accepted.store)
                self.window.finish(accepted, is_stored=True, now_ms=self.now_ms)
                for offset in held:
                    self.records[offset].told = AcknowledgeType.ACCEPT
                    self.ends(self.records[offset])
            if self.window.start_offset >= self.log_end:
                break
        assert self.window.start_offset >= max(self.log_end, self.log_start) or not self.log
        assert all(record.done for record in self.records.values())
        assert all(record.is_copied for record in self.records.values() if record.done == "dead")


def test_acquisition_keeps_its_promises() -> None:
    run_state_machine_as_test(
        Acquisition,
        settings=settings(
            max_examples=300,
            stateful_step_count=50,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
        ),
    )
