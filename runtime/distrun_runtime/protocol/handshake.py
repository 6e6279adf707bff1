"""HELLO: how two nodes prove to each other that they belong to the same job.

The side that opens the connection sends HELLO (who it is, what it expects, a nonce). The side that accepts
answers CHALLENGE (a nonce of its own and its proof), gets PROOF, and says WELCOME or REFUSED. A proof is an HMAC-SHA256
under the job's token over both nonces, the acceptor's role and rank and all that HELLO says, with a label for the
direction (ISO/IEC 9798-4, mutual three-pass authentication, with one pass more to say the verdict). The token
never crosses. Authentication belongs to the connection: after a reconnect it is done again.

A job without a token is open: both sides say so, and a node with a token never joins it, nor the reverse.

No side effects: nonces are passed in.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from functools import cached_property
from typing import Any

from distrun_runtime.arrays.dtypes import Buffer
from distrun_runtime.contract.dataclass import dataclass
from distrun_runtime.errors import WireError
from distrun_runtime.protocol.message import VERSION, Kind, Message, size_of

TOKEN = "token"
OPEN = "open"

SIZE_LIMIT = 8192
"""Bytes of a message of a node that has proven nothing."""
_TEXT_LIMIT = 256
"""Characters of a name in HELLO: of a job, host, endpoint."""
_REASON_LIMIT = 500
"""Characters of a reason."""


@dataclass(frozen=True)
class NodeIdentity:
    """Who a node says it is."""

    job: str
    role: str
    rank: int
    """-1: not given; the scheduler will."""
    incarnation: int
    host: str
    pid: int
    endpoint: str
    """Where it can be reached, `tcp://address:port`; empty if it does not listen."""
    workers: int
    servers: int
    resends: bool = False
    """Whether its messages are in envelopes (`transport.resend`)."""

    @cached_property
    def name(self) -> str:
        """`worker-1`, or `worker` while it has no rank."""
        if self.role == "scheduler":
            return "scheduler"
        return f"{self.role}-{self.rank}" if self.rank >= 0 else self.role

    def __str__(self) -> str:
        return f"{self.name}@{self.host} (pid {self.pid})"


def nodes_of(value: Sequence[Mapping[str, Any]]) -> list[NodeIdentity]:
    """Return the nodes of a ROSTER message; members that we do not know are ignored."""
    names = [each.name for each in fields(NodeIdentity)]
    return [NodeIdentity(**{name: node[name] for name in names}) for node in value]


class Opener:
    """The side that connects. Feed it what comes back; it says what to send."""

    def __init__(self, me: NodeIdentity, token: bytes, nonce: str, calls: str = "") -> None:
        self._me = me
        self._token = token
        self._nonce = nonce
        self._calls = calls
        """The node we mean to reach (`server-1`); empty: any of the job."""

    def hello(self) -> Message:
        """Return the first message of a fresh connection."""
        auth = TOKEN if self._token else OPEN
        me = {name: value for name, value in asdict(self._me).items() if name != "resends" or value}
        return Message(Kind.HELLO, body={**me, "version": VERSION, "nonce": self._nonce, "auth": auth})

    def answer(self, challenge: Message) -> Message | str:
        """Return PROOF for a CHALLENGE, or the reason why the other side cannot be trusted."""
        body = challenge.body
        reason = auth_reason(self._token, body.get("auth"), "the other side")
        if reason:
            return reason
        # A server that has no rank yet (a job started by hand) is any server.
        role, rank = body.get("role"), body.get("rank")
        if self._calls and self._calls not in (role, f"{role}-{rank}") and rank != -1:
            return f"{role}-{rank} answers where {self._calls} was called"
        theirs, ours = (_proof(self._token, label, self._nonce, body, self._me) for label in ("acceptor", "opener"))
        if self._token and not _is_same(body.get("proof"), theirs):
            return "the other side does not know this job's token: it belongs to another job"
        return Message(Kind.PROOF, body={"proof": ours})


class Acceptor:
    """The side that was connected to; one for each connection."""

    def __init__(self, me: NodeIdentity, token: bytes, nonce: str) -> None:
        self._me = me
        self._token = token
        self._mine: Mapping[str, Any] = {"nonce": nonce, "role": me.role, "rank": me.rank}
        self._theirs = ""
        self.peer: NodeIdentity | None = None
        """Who the other side says it is; proven once `verdict` has said WELCOME."""

    def challenge(self, hello: Message) -> Message:
        """Return CHALLENGE for a HELLO, or REFUSED."""
        if hello.body.get("version") != VERSION:
            found = hello.body.get("version")
            return refused(f"protocol version {found!r:.80}; {self._me.name} speaks {VERSION}")
        try:
            self.peer = _identity(hello.body)
            self._theirs = _text(hello.body, "nonce")
        except (KeyError, TypeError, ValueError, OverflowError) as err:
            return refused(f"HELLO lacks or garbles a field: {err}")
        reason = auth_reason(self._token, hello.body.get("auth"), str(self.peer)) or _resend_reason(self._me, self.peer)
        if reason:
            return refused(reason)
        body = dict(self._mine, auth=TOKEN if self._token else OPEN)
        if self._token:
            body["proof"] = _proof(self._token, "acceptor", self._theirs, self._mine, self.peer)
        return Message(Kind.CHALLENGE, body=body)

    def verdict(self, proof: Message, admit: Callable[[NodeIdentity], str]) -> Message:
        """Return WELCOME or REFUSED. `admit` gives the reason against a proven node; empty: it may come in."""
        if self.peer is None:
            return refused("PROOF without HELLO")
        right = _proof(self._token, "opener", self._theirs, self._mine, self.peer)
        if self._token and not _is_same(proof.body.get("proof"), right):
            return refused(f"{self.peer} does not know this job's token: it belongs to another job")
        reason = admit(self.peer)
        return refused(reason) if reason else Message(Kind.WELCOME)


def refused(reason: str) -> Message:
    """Return the message that turns a node away."""
    return Message(Kind.REFUSED, body={"reason": reason[:_REASON_LIMIT]})


def auth_reason(token: bytes, theirs: object, who: str) -> str:
    """Return why a node with `token` does not go with one whose HELLO or CHALLENGE says TOKEN or OPEN; empty: it does.

    Arguments:
        who: the other one, for people.
    """
    if theirs not in (TOKEN, OPEN):
        return f"{who} names no way of authentication"
    if token and theirs == OPEN:
        return f"{who} runs open (no token); this job has one: start it with DISTRUN_TOKEN_FILE"
    if not token and theirs == TOKEN:
        return f"{who} has a token; this job runs open: start all its processes with the same DISTRUN_TOKEN_FILE"
    return ""


def _resend_reason(me: NodeIdentity, peer: NodeIdentity) -> str:
    if me.resends == peer.resends:
        return ""
    return (
        f"{peer} runs with PS_RESEND={peer.resends:d} and {me.name} with PS_RESEND={me.resends:d}: set it alike for all"
        " nodes of a job"
    )


def _identity(body: Mapping[str, Any]) -> NodeIdentity:
    told: dict[str, Any] = {name: _text(body, name) for name in ("job", "role", "host", "endpoint")}
    told |= {name: _whole(body, name) for name in ("incarnation", "pid", "workers", "servers")}
    who = NodeIdentity(**told, rank=_whole(body, "rank", low=-1), resends=bool(body.get("resends", False)))
    if who.role not in ("scheduler", "server", "worker"):
        raise ValueError(f"role {who.role!r}")
    return who


def _text(body: Mapping[str, Any], name: str) -> str:
    value = body[name]
    if not isinstance(value, str) or len(value) > _TEXT_LIMIT or not value.isprintable():
        raise ValueError(f"{name} is not a text of at most {_TEXT_LIMIT} printable characters: {value!r:.80}")
    return value


def _whole(body: Mapping[str, Any], name: str, low: int = 0) -> int:
    value = body[name]
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value < 2**31:
        raise ValueError(f"{name} is not a number from {low} to {2**31 - 1}: {value!r:.80}")
    return value


def _proof(token: bytes, label: str, opener: str, acceptor: Mapping[str, Any], who: NodeIdentity) -> str:
    transcript = [label, opener, acceptor.get("nonce"), acceptor.get("role"), acceptor.get("rank")]
    transcript += [who.job, who.role, who.rank, who.incarnation, who.host, who.pid, who.endpoint]
    transcript += [who.workers, who.servers]
    return hmac.new(token, json.dumps(transcript).encode(), "sha256").hexdigest()


def _is_same(found: object, proof: str) -> bool:
    return isinstance(found, str) and hmac.compare_digest(found.encode("utf-8", "replace"), proof.encode())


def check_size(frames: Sequence[Buffer]) -> None:
    """Refuse what is too large for a message of the handshake, before it is read.

    Raises:
        WireError: it is.
    """
    size = size_of(frames)
    if len(frames) > 2 or size > SIZE_LIMIT:
        raise WireError(
            f"a message of {len(frames)} frames and {size} bytes before WELCOME; at most 2 and {SIZE_LIMIT}"
        )


def check_first(message: Message) -> None:
    """Refuse anything but a handshake message on a connection that is not welcome yet.

    Raises:
        WireError: it is another kind.
    """
    if message.kind not in (Kind.HELLO, Kind.PROOF):
        raise WireError(f"{message.kind.name} before WELCOME")
