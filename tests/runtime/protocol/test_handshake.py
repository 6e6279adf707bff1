"""HELLO: who is let in, who is not, and that the token never crosses. No socket here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from distrun_runtime.errors import WireError
from distrun_runtime.protocol import message
from distrun_runtime.protocol.handshake import Acceptor, NodeIdentity, Opener, check_first
from distrun_runtime.protocol.message import Kind, Message

TOKEN = b"0123456789abcdef-the-token"
WORKER = NodeIdentity("job", "worker", 1, 0, "d2", 77, "tcp://10.0.0.2:4000", 2, 1)
SERVER = NodeIdentity("job", "server", 0, 0, "d1", 66, "tcp://10.0.0.1:4000", 2, 1)


def everybody(peer: NodeIdentity) -> str:
    return ""


def through(sent: Message) -> Message:
    """A message as it arrives at the other side."""
    return message.decode([bytes(frame) for frame in message.encode(sent)])


def shake(
    mine: bytes = TOKEN,
    theirs: bytes = TOKEN,
    admit: Callable[[NodeIdentity], str] = everybody,
    who: NodeIdentity = WORKER,
) -> tuple[str, Acceptor, list[Message]]:
    """Return what came of it (`welcome`, or the reason and who gave it), the acceptor, and all messages."""
    opener, acceptor = Opener(who, mine, "aa" * 16), Acceptor(SERVER, theirs, "bb" * 16)
    said = [opener.hello()]
    said.append(acceptor.challenge(through(said[-1])))
    if said[-1].kind is Kind.REFUSED:
        return "acceptor: " + str(said[-1].body["reason"]), acceptor, said
    answer = opener.answer(through(said[-1]))
    if isinstance(answer, str):
        return "opener: " + answer, acceptor, said
    said.append(answer)
    said.append(acceptor.verdict(through(answer), admit))
    if said[-1].kind is Kind.REFUSED:
        return "acceptor: " + str(said[-1].body["reason"]), acceptor, said
    return said[-1].kind.name.lower(), acceptor, said


def test_the_same_token_on_both_sides_is_welcome_and_tells_who_came() -> None:
    outcome, acceptor, _ = shake()
    assert outcome == "welcome"
    assert acceptor.peer == WORKER


def test_an_open_job_lets_in_whoever_is_open_too() -> None:
    assert shake(b"", b"")[0] == "welcome"


def test_a_wrong_token_is_noticed_by_the_side_that_opened() -> None:
    """The acceptor proves itself first: a stranger's scheduler learns nothing of the opener."""
    outcome, _, said = shake(TOKEN, b"another")
    assert outcome == "opener: the other side does not know this job's token: it belongs to another job"
    assert [each.kind for each in said] == [Kind.HELLO, Kind.CHALLENGE]


def test_a_wrong_proof_is_noticed_by_the_side_that_accepted() -> None:
    acceptor = Acceptor(SERVER, TOKEN, "bb")
    acceptor.challenge(through(Opener(WORKER, b"another", "aa").hello()))
    for proof in ("00" * 32, "", None, 5, "\ud800"):
        verdict = acceptor.verdict(through(Message(Kind.PROOF, body={"proof": proof})), everybody)
        assert verdict.kind is Kind.REFUSED
        assert verdict.body["reason"] == "%s does not know this job's token: it belongs to another job" % WORKER


def test_open_meets_token_each_way() -> None:
    assert shake(b"", TOKEN)[0] == (
        "acceptor: worker-1@d2 (pid 77) runs open (no token); this job has one: start it with DISTRUN_TOKEN_FILE"
    )
    assert shake(TOKEN, b"")[0] == (
        "acceptor: worker-1@d2 (pid 77) has a token; this job runs open: start all its processes with the same"
        " DISTRUN_TOKEN_FILE"
    )


def test_an_opener_with_a_token_never_follows_a_challenge_that_is_open() -> None:
    """Somebody in between says `open` for an acceptor that is not."""
    opener = Opener(WORKER, TOKEN, "aa")
    answer = opener.answer(Message(Kind.CHALLENGE, body={"nonce": "bb", "role": "server", "rank": 0, "auth": "open"}))
    assert isinstance(answer, str)
    assert "the other side runs open (no token)" in answer
    assert opener.answer(Message(Kind.CHALLENGE)) == "the other side names no way of authentication"


@pytest.mark.parametrize("version", [0, 1, "3", None])
def test_another_version_is_refused_and_both_are_named(version: object) -> None:
    hello = Opener(WORKER, TOKEN, "aa").hello()
    refused = Acceptor(SERVER, TOKEN, "bb").challenge(replace(hello, body={**hello.body, "version": version}))
    assert refused.kind is Kind.REFUSED
    assert refused.body["reason"] == "protocol version %r; server-0 speaks 4" % (version,)


@pytest.mark.parametrize(
    "change",
    [
        *({"drop": name} for name in ("job", "role", "rank", "incarnation", "host", "pid", "endpoint", "nonce")),
        *({"drop": name} for name in ("workers", "servers")),
        {"rank": "one"},
        {"rank": None},
        {"rank": float("inf")},
        {"pid": float("nan")},
        {"workers": []},
        {"role": "boss"},
        {"role": 3},
    ],
    ids=str,
)
def test_a_garbled_hello_is_refused_and_never_raises(change: dict[str, Any]) -> None:
    body = dict(Opener(WORKER, TOKEN, "aa").hello().body)
    body.pop(change.get("drop", ""), None)
    body.update((name, value) for name, value in change.items() if name != "drop")
    refused = Acceptor(SERVER, TOKEN, "bb").challenge(through(Message(Kind.HELLO, body=body)))
    assert refused.kind is Kind.REFUSED
    assert "HELLO lacks or garbles a field" in refused.body["reason"]


@pytest.mark.parametrize("auth", [None, "", "none", 1])
def test_a_hello_without_a_known_way_of_authentication_is_refused(auth: object) -> None:
    body = {**Opener(WORKER, TOKEN, "aa").hello().body, "auth": auth}
    refused = Acceptor(SERVER, TOKEN, "bb").challenge(Message(Kind.HELLO, body=body))
    assert refused.body["reason"] == "worker-1@d2 (pid 77) names no way of authentication"


def test_a_proof_that_was_overheard_is_worth_nothing_on_another_connection() -> None:
    _, _, said = shake()
    hello, _, proof, _ = said
    later = Acceptor(SERVER, TOKEN, "cc" * 16)
    assert later.challenge(through(hello)).kind is Kind.CHALLENGE
    assert later.verdict(through(proof), everybody).kind is Kind.REFUSED


def test_the_acceptors_own_proof_is_none_of_the_opener() -> None:
    """Reflection: the proofs of the two directions differ."""
    _, _, said = shake()
    acceptor = Acceptor(SERVER, TOKEN, "bb" * 16)
    acceptor.challenge(through(said[0]))
    mirrored = Message(Kind.PROOF, body={"proof": said[1].body["proof"]})
    assert acceptor.verdict(mirrored, everybody).kind is Kind.REFUSED


@pytest.mark.parametrize("claim", [{"rank": 0}, {"role": "server"}, {"job": "other"}, {"incarnation": 1}], ids=str)
def test_a_proof_holds_for_the_identity_it_was_made_for_only(claim: dict[str, Any]) -> None:
    opener, acceptor = Opener(WORKER, TOKEN, "aa"), Acceptor(SERVER, TOKEN, "bb")
    challenge = acceptor.challenge(through(opener.hello()))
    proof = opener.answer(through(challenge))
    assert isinstance(proof, Message)
    forged = {**opener.hello().body, **claim}
    acceptor.challenge(through(Message(Kind.HELLO, body=forged)))
    assert acceptor.verdict(through(proof), everybody).kind is Kind.REFUSED


def test_the_reason_of_admit_reaches_the_other_side() -> None:
    outcome, _, said = shake(admit=lambda peer: "no room for %s" % peer.name)
    assert outcome == "acceptor: no room for worker-1"
    assert through(said[-1]).body == {"reason": "no room for worker-1"}


def test_admit_is_asked_only_about_a_proven_node() -> None:
    asked: list[NodeIdentity] = []
    acceptor = Acceptor(SERVER, TOKEN, "bb")
    acceptor.challenge(Opener(WORKER, TOKEN, "aa").hello())
    acceptor.verdict(Message(Kind.PROOF, body={"proof": "00"}), lambda peer: asked.append(peer) or "")
    assert asked == []


def test_a_proof_without_hello_is_refused() -> None:
    assert Acceptor(SERVER, TOKEN, "bb").verdict(Message(Kind.PROOF), everybody).body == {
        "reason": "PROOF without HELLO"
    }


def test_the_token_is_in_no_message() -> None:
    for mine, theirs in ((TOKEN, TOKEN), (TOKEN, b"another"), (TOKEN, b""), (b"", TOKEN)):
        _, acceptor, said = shake(mine, theirs)
        assert acceptor.peer is not None
        sent = b"".join(bytes(frame) for each in said for frame in message.encode(each))
        assert TOKEN not in sent
        assert TOKEN.hex().encode() not in sent


@pytest.mark.parametrize("kind", sorted(set(Kind) - {Kind.HELLO, Kind.PROOF}))
def test_nothing_but_the_handshake_is_heard_before_welcome(kind: Kind) -> None:
    with pytest.raises(WireError, match="%s before WELCOME" % kind.name):
        check_first(Message(kind))
    check_first(Message(Kind.HELLO))
    check_first(Message(Kind.PROOF))


def test_names_of_nodes() -> None:
    assert WORKER.name == "worker-1"
    assert replace(WORKER, rank=-1).name == "worker"
    assert replace(WORKER, role="scheduler").name == "scheduler"
    assert str(SERVER) == "server-0@d1 (pid 66)"


def test_a_node_that_answers_in_anothers_place_is_turned_away() -> None:
    """The acceptor knows the token, but is not the server that was called."""
    opener, acceptor = Opener(WORKER, TOKEN, "aa", calls="server-7"), Acceptor(SERVER, TOKEN, "bb")
    answer = opener.answer(through(acceptor.challenge(through(opener.hello()))))
    assert answer == "server-%d answers where server-7 was called" % SERVER.rank


def test_both_sides_resend_or_neither() -> None:
    resending = replace(WORKER, resends=True)
    reason, _, said = shake(who=resending)
    assert (
        reason == "acceptor: worker-1@d2 (pid 77) runs with PS_RESEND=1 and server-0 with PS_RESEND=0: set it alike"
        " for all nodes of a job"
    )
    assert said[0].body["resends"] is True
    assert "resends" not in shake()[2][0].body
