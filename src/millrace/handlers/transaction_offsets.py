"""TxnOffsetCommit: where a consumer has got to, as part of the transaction in which its records are processed.

Topics and partitions are checked against the cluster image here, and the transaction's coordinator is asked; who may
commit, and when a commit counts, is the group coordinator's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from millrace.errors import ApiError, ErrorCode
from millrace.groups.offsets.committed import OffsetToCommit
from millrace.handlers.context import RequestContext
from millrace.handlers.group_offsets import offset_to_commit
from millrace.handlers.needs import READ_GROUP, READ_TOPIC, WRITE_TRANSACTIONAL_ID, judged
from millrace.handlers.registry import api
from millrace.handlers.transactional import UNANSWERED, VERIFICATION_SETTING
from millrace.wire.keys import ApiKey
from millrace.wire.messages.transactions import TxnOffsetCommitRequest, TxnOffsetCommitResponse

if TYPE_CHECKING:
    from millrace.handlers.context import TransactionGate

LOADING_FROM: Final = 2
"""From this version on clients know COORDINATOR_LOAD_IN_PROGRESS (KAFKA-7296)."""
ABORTABLE_FROM: Final = 4
"""From this version on a client knows TRANSACTION_ABORTABLE."""
ADDS_FROM: Final = 5
"""From this version on the request adds to the transaction, and every transaction has its own producer epoch."""


@api(
    ApiKey.TXN_OFFSET_COMMIT,
    TxnOffsetCommitRequest,
    "0-5",
    needs=judged(WRITE_TRANSACTIONAL_ID, READ_GROUP, READ_TOPIC),
    overlaps=True,
)
async def txn_offset_commit(context: RequestContext, request: TxnOffsetCommitRequest) -> TxnOffsetCommitResponse:
    """Commit offsets of a group in a transaction: durable when it is answered, visible when the transaction commits.

    Until then OffsetFetch returns what was committed before, or UNSTABLE_OFFSET_COMMIT to who asks for stable offsets.
    Errors are per partition: an unknown topic or partition, and metadata beyond offset.metadata.max.bytes, do not harm
    the others. INVALID_PRODUCER_EPOCH: there is a newer producer.

    Before the first commit of a transaction its coordinator is asked (KIP-890): up to v4 whether the group's offsets
    were added to the transaction, unless `transaction.partition.verification.enable` is off; from v5 on to add them.
    While it cannot say, the answer is COORDINATOR_LOAD_IN_PROGRESS, which clients send again.

    Versions: below v2 COORDINATOR_LOAD_IN_PROGRESS is COORDINATOR_NOT_AVAILABLE; v2 adds the leader epoch; v3 the
    member (KIP-447: UNKNOWN_MEMBER_ID, FENCED_INSTANCE_ID, and ILLEGAL_GENERATION also if an epoch of KIP-848 is
    stale), whose session it does not renew; v4 knows TRANSACTION_ABORTABLE, before it is INVALID_TXN_STATE; v5 adds to
    the transaction.
    """
    response = TxnOffsetCommitResponse()
    accepted: list[OffsetToCommit] = []
    answers: list[TxnOffsetCommitResponse.TxnOffsetCommitResponsePartition] = []
    refused = ErrorCode.NONE
    if not context.may(*WRITE_TRANSACTIONAL_ID, request.transactional_id):
        refused = ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
    elif not context.may(*READ_GROUP, request.group_id):
        refused = ErrorCode.GROUP_AUTHORIZATION_FAILED
    may_read = context.rights(*READ_TOPIC)
    for topic in request.topics:
        answered = TxnOffsetCommitResponse.TxnOffsetCommitResponseTopic(name=topic.name)
        response.topics.append(answered)
        known = context.broker.image.topics.get(topic.name)
        for partition in topic.partitions:
            index = partition.partition_index
            answer = TxnOffsetCommitResponse.TxnOffsetCommitResponsePartition(partition_index=index)
            answered.partitions.append(answer)
            if refused or not may_read(topic.name):
                answer.error_code = refused or ErrorCode.TOPIC_AUTHORIZATION_FAILED
                continue
            if known is None or not 0 <= index < len(known.partitions):
                answer.error_code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
                continue
            answers.append(answer)
            accepted.append(offset_to_commit(topic.name, known.topic_id, partition))
    if not accepted:
        return response
    try:
        errors: Sequence[ErrorCode] = await context.broker.groups.commit_in_transaction(
            request.group_id,
            accepted,
            _Producer(
                request.transactional_id,
                request.producer_id,
                request.producer_epoch,
                bumps_epoch=context.version >= ADDS_FROM,
                is_verified=context.broker.config.get_bool(VERIFICATION_SETTING),
                gate=context.broker.transaction_gate,
            ),
            member_id=request.member_id,
            instance_id=request.group_instance_id,
            generation=request.generation_id,
        )
    except ApiError as error:
        errors = [error.code] * len(answers)
    for answer, code in zip(answers, errors, strict=True):
        answer.error_code = _told(code, context.version)
    return response


@dataclass(frozen=True, slots=True)
class _Producer:
    """Who sent the request, as the group coordinator sees it."""

    transactional_id: str
    producer_id: int
    producer_epoch: int
    bumps_epoch: bool
    is_verified: bool
    gate: TransactionGate

    async def admit(self, topic: str, partition: int) -> None:
        if not self.bumps_epoch and not self.is_verified:
            return
        place = (topic, partition)
        try:
            answers = await self.gate.admit(
                self.transactional_id, self.producer_id, self.producer_epoch, [place], add=self.bumps_epoch
            )
            code = answers.get(place, ErrorCode.NONE)
        except ApiError as error:
            code = error.code
        if code in UNANSWERED or code is ErrorCode.CONCURRENT_TRANSACTIONS:
            # Sent again as it is, without a search for another coordinator of the group.
            raise ApiError(
                ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, f"{self.transactional_id!r} could not be asked for: {code.name}"
            )
        if code is not ErrorCode.NONE:
            raise ApiError(code, f"the coordinator refuses {self.transactional_id!r}")


def _told(code: ErrorCode, version: int) -> ErrorCode:
    """What a client of this version understands."""
    if code is ErrorCode.COORDINATOR_LOAD_IN_PROGRESS and version < LOADING_FROM:
        return ErrorCode.COORDINATOR_NOT_AVAILABLE
    if code is ErrorCode.TRANSACTION_ABORTABLE and version < ABORTABLE_FROM:
        return ErrorCode.INVALID_TXN_STATE
    return ErrorCode.INVALID_PRODUCER_EPOCH if code is ErrorCode.PRODUCER_FENCED else code
