"""Users over the codec, on the controller."""

from __future__ import annotations

from millrace.errors import ErrorCode
from millrace.handlers.scram_users import alter_user_scram_credentials, describe_user_scram_credentials
from millrace.security.scram import ScramMechanism
from millrace.wire.messages.scram import AlterUserScramCredentialsRequest, DescribeUserScramCredentialsRequest
from support.handling import Handling, handling
from support.sasl import upsertion

SHA_256, SHA_512 = ScramMechanism


def named(*names: str) -> DescribeUserScramCredentialsRequest:
    return DescribeUserScramCredentialsRequest(
        users=[DescribeUserScramCredentialsRequest.UserName(name=name) for name in names]
    )


async def described(
    rig: Handling, request: DescribeUserScramCredentialsRequest
) -> list[tuple[str, ErrorCode, list[tuple[int, int]]]]:
    answer = await rig.call(describe_user_scram_credentials, request, 0)
    assert (answer.error_code, answer.error_message) == (ErrorCode.NONE, None)
    return [
        (each.user, ErrorCode(each.error_code), [(info.mechanism, info.iterations) for info in each.credential_infos])
        for each in answer.results
    ]


async def test_users_are_made_described_and_removed() -> None:
    async with handling() as rig:
        assert await described(rig, DescribeUserScramCredentialsRequest(users=None)) == []
        for mechanism, iterations in ((SHA_256, 4096), (SHA_512, 8192)):
            request = AlterUserScramCredentialsRequest(
                upsertions=[upsertion("bob", mechanism, "x", iterations), upsertion("alice", SHA_256, "x")]
            )
            answer = await rig.call(alter_user_scram_credentials, request, 0)
            assert [(each.user, each.error_code, each.error_message) for each in answer.results] == [
                ("bob", 0, None),
                ("alice", 0, None),
            ]
        bob = ("bob", ErrorCode.NONE, [(SHA_256, 4096), (SHA_512, 8192)])
        everybody = [("alice", ErrorCode.NONE, [(SHA_256, 4096)]), bob]
        assert await described(rig, DescribeUserScramCredentialsRequest(users=None)) == everybody
        assert await described(rig, named()) == everybody
        assert await described(rig, named("bob", "nobody", "bob2", "bob2", "")) == [
            bob,
            ("nobody", ErrorCode.RESOURCE_NOT_FOUND, []),
            ("bob2", ErrorCode.DUPLICATE_RESOURCE, []),
            ("", ErrorCode.RESOURCE_NOT_FOUND, []),
        ]
        removal = AlterUserScramCredentialsRequest.ScramCredentialDeletion(name="bob", mechanism=SHA_256)
        answer = await rig.call(alter_user_scram_credentials, AlterUserScramCredentialsRequest(deletions=[removal]), 0)
        assert [each.error_code for each in answer.results] == [0]
        assert await described(rig, named("bob")) == [("bob", ErrorCode.NONE, [(SHA_512, 8192)])]


async def test_errors_are_told_by_user() -> None:
    async with handling() as rig:
        request = AlterUserScramCredentialsRequest(
            deletions=[AlterUserScramCredentialsRequest.ScramCredentialDeletion(name="nobody", mechanism=1)],
            upsertions=[
                upsertion("twice", SHA_256, "x"),
                upsertion("twice", SHA_512, "x"),
                upsertion("weak", SHA_256, "x", 100),
                upsertion("good", SHA_256, "x"),
            ],
        )
        answer = await rig.call(alter_user_scram_credentials, request, 0)
        assert {each.user: (ErrorCode(each.error_code), each.error_message) for each in answer.results} == {
            "nobody": (ErrorCode.RESOURCE_NOT_FOUND, "Attempt to delete a user credential that does not exist"),
            "twice": (ErrorCode.DUPLICATE_RESOURCE, "A user credential cannot be altered twice in the same request"),
            "weak": (ErrorCode.UNACCEPTABLE_CREDENTIAL, "Too few iterations"),
            "good": (ErrorCode.NONE, None),
        }
        assert list(rig.controller.image.users) == [("good", SHA_256)]
