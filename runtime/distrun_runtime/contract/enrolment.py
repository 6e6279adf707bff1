"""Enrolment: how an agent that dials back and its coordinator prove to each other that they belong to one job.

The agent opens a TLS connection and compares the SHA-256 of the certificate, the *pin*, before it sends anything. Then
each side sends lines of JSON:

    coordinator  {"type": "enrol", "version": 1, "nonce": ...}
    agent        {"type": "claim" or "redial", "job", "place", "nonce", "proof", "program"}
    coordinator  {"type": "welcome", "proof", "key"} or {"type": "denied", "reason"}

An agent claims its place with the enrolment secret, which all agents of the job have. The key in the answer belongs to
this place alone: with it the agent proves itself when it dials again. Proofs are HMAC-SHA256 over both nonces, the
place, the pin and the job, with a label for the direction, so that no proof can be used on another connection, for
another place, or against the side that made it. Secret and keys are used as the bytes of their text.

The functions that talk are generators, so that one thread may lead many conversations: they yield what the socket has
to become ready for (`selectors.EVENT_READ` or `EVENT_WRITE`), and return when they are done.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import json
import selectors
import socket
import ssl
from typing import Any, Callable, Generator, Mapping, NamedTuple, Tuple, TypeVar

from distrun_runtime.errors import WireError

VERSION = 1
LINE_BYTES = 2048
"""Longest line, newline included. It is also all that is read of a side that has not proven itself."""
PLACE_LENGTH = 128
"""Longest name of a place, characters."""
NONCE_BYTES = 16
SECRET_BYTES = 32
CLAIM = "claim"
REDIAL = "redial"
AGENT = "agent"
COORDINATOR = "coordinator"

Result = TypeVar("Result")
Talk = Generator[int, None, Result]


class Claim(NamedTuple):
    """What an agent says to be let in. Nothing of it is true before `proof` was checked."""

    is_redial: bool
    job: str
    place: str
    nonce: str
    """Chosen once by each agent, and kept for its further connections."""
    proof: str
    program: bool = False
    """Whether the agent's program is to be sent after the answer."""


def pin_of(der: bytes) -> str:
    """Return the pin of a certificate: SHA-256 of its DER form, hex."""
    return hashlib.sha256(der).hexdigest()


def proof(key: str, side: str, kind: str, *, job: str, place: str, pin: str, nonces: Tuple[str, str]) -> str:
    """Return what proves to the other side that this one knows `key`, hex.

    Args:
        key: the enrolment secret (kind `claim`) or the place's own key (kind `redial`).
        side: who proves itself, AGENT or COORDINATOR.
        nonces: the coordinator's and the agent's.
    """
    words = (f"distrun-enrolment-{VERSION}", side, kind, job, place, pin, *nonces)
    return hmac.new(key.encode("utf-8"), "\n".join(words).encode("utf-8"), "sha256").hexdigest()


def is_same(one: str, other: str) -> bool:
    """Return whether two proofs or pins are equal; takes equally long for any two of one length."""
    return hmac.compare_digest(one.encode("utf-8"), other.encode("utf-8"))


def is_name(text: object) -> bool:
    """Return whether this can name a job or a place: short, printable, without blanks."""
    is_text = isinstance(text, str) and 0 < len(text) <= PLACE_LENGTH
    return is_text and all(letter.isprintable() and not letter.isspace() for letter in str(text))


def with_port(host: str, port: int) -> str:
    """Return `ADDRESS:PORT`. No side effects."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


# Lines


def encode(**members: Any) -> bytes:
    """Return one line."""
    return json.dumps(members, separators=(",", ":"), sort_keys=True).encode("ascii") + b"\n"


def enrol(nonce: str) -> bytes:
    """Return the coordinator's first line."""
    return encode(type="enrol", version=VERSION, nonce=nonce)


def claim(made: Claim) -> bytes:
    """Return the agent's line."""
    kind = REDIAL if made.is_redial else CLAIM
    program = {"program": True} if made.program else {}
    return encode(type=kind, job=made.job, place=made.place, nonce=made.nonce, proof=made.proof, **program)


def welcome(proof: str, key: str = "") -> bytes:
    """Return the line that lets an agent in. `key`: what it proves itself with next time."""
    return encode(type="welcome", proof=proof, key=key) if key else encode(type="welcome", proof=proof)


def denied(reason: str) -> bytes:
    """Return the line that refuses an agent for good."""
    return encode(type="denied", reason=reason)


def decode(line: bytes) -> Mapping[str, Any]:
    """Return the members of a line.

    Raises:
        WireError: it is none of ours.
    """
    try:
        members = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as err:
        raise WireError(f"this is no line of an enrolment: {err}") from None
    if not isinstance(members, dict) or not isinstance(members.get("type"), str):
        raise WireError("this is no line of an enrolment: no object with a type")
    return members


def nonce_of(line: bytes) -> str:
    """Return the nonce of the coordinator's first line.

    Raises:
        WireError: it is not that line, or of another version.
    """
    members = decode(line)
    if members["type"] != "enrol" or members.get("version") != VERSION:
        raise WireError(f"expected enrolment version {VERSION}, got {dict(members)!r:.200}")
    return _text(members, "nonce")


def claim_of(line: bytes) -> Claim:
    """Return what an agent claims.

    Raises:
        WireError: it is no such line.
    """
    members = decode(line)
    if members["type"] not in (CLAIM, REDIAL):
        raise WireError(f"expected a claim, got {members['type']!r:.80}")
    job, place, nonce, proof = (_text(members, name) for name in ("job", "place", "nonce", "proof"))
    return Claim(members["type"] == REDIAL, job, place, nonce, proof, members.get("program") is True)


def _text(members: Mapping[str, Any], name: str) -> str:
    value = members.get(name)
    if not is_name(value):
        raise WireError(f"{value!r:.80} is no {name}")
    return str(value)


# Conversations on a TLS socket that does not block


def retried(call: Callable[[], Result]) -> Talk[Result]:
    """Call until the socket is ready for it; return the result. Raises what `call` does."""
    while True:
        try:
            return call()
        except ssl.SSLWantReadError:
            yield selectors.EVENT_READ
        except ssl.SSLWantWriteError:
            yield selectors.EVENT_WRITE


def sent(tls: ssl.SSLSocket, data: bytes) -> Talk[None]:
    """Send all of `data`."""
    rest = memoryview(data)
    while rest:
        size = yield from retried(functools.partial(tls.send, rest))
        rest = rest[size:]


def line(tls: ssl.SSLSocket) -> Talk[Tuple[bytes, bytes]]:
    """Return the next line, without its newline, and what came after it. At most LINE_BYTES are read.

    Raises:
        WireError: the line is too long, or the connection ended before it did.
    """
    found = b""
    while b"\n" not in found:
        if len(found) >= LINE_BYTES:
            raise WireError(f"a line of an enrolment is longer than {LINE_BYTES} bytes")
        data = yield from retried(functools.partial(tls.recv, LINE_BYTES - len(found)))
        if not data:
            raise WireError("the connection ended during the enrolment")
        found += data
    head, _, rest = found.partition(b"\n")
    return head, rest


def await_socket(selector: selectors.BaseSelector, sock: socket.socket, wanted: int, call: Callable[[], None]) -> None:
    """Have a selector call a function when a socket is ready for what its conversation yielded; 0: for nothing."""
    key = selector.get_map().get(sock)
    if key is None and wanted:
        selector.register(sock, wanted, call)
    elif key is not None and not wanted:
        selector.unregister(sock)
    elif key is not None and key.events != wanted:
        selector.modify(sock, wanted, key.data)
