"""Frames, and sessions: the numbered conversation of a coordinator and one agent, which outlives its connections.

Both sides have one end of it, an object of this class. What one end is given by `say` comes out of the other end's
`feed` once and in order, however often the connection is cut in between:

* A frame has a number (`seq`) and is kept until the other side has said that it came (`received`). After a cut both
  sides begin the new connection with `resume`, which says what came; the rest is sent again, and what comes twice is
  dropped by its number. Frames of the types in UNNUMBERED say how things are now: they are neither numbered nor kept.
* A large body (`send_large`) goes in chunks, each a frame of its own. They are read from their source as they are sent,
  and only as far as the other side's `credit` goes, so little is on its way at any time. Every other frame overtakes
  the chunks that have not left, so the host at the end of a slow line still answers pings.

No side effects: `feed` takes what has arrived, `next` returns what is to be written. `docs/protocol.md` has the bytes.
"""

from __future__ import annotations

import json
import re
import struct
from collections import deque
from typing import Any, BinaryIO, Deque, Dict, Iterable, Iterator, List, NamedTuple, Optional, Tuple, Union

from distrun_runtime.errors import WireError

# Frames between a coordinator and an agent.
#
# A frame is a 4-byte big-endian length, that many bytes of JSON (an object, UTF-8), and then as many raw bytes
# as the object's "size" says (none when it is absent). Both directions use the same frames, over any byte
# stream: a pipe, an ssh channel, a socket. `docs/protocol.md` lists the messages; its golden bytes are tests.
#
# `Decoder.feed` takes what arrived and gives back whole frames.


VERSION = 3
"""Version of the agent protocol; both hellos carry it and a difference is refused."""

HEADER_LIMIT = 16 * 1024 * 1024
BODY_LIMIT = 16 * 1024 * 1024

_LENGTH = struct.Struct(">I")
_HALF_CHARACTER = "[\ud800-\udc7f\udd00-\udfff]"
"""Surrogates that stand for no byte: UTF-8 cannot write them, JSON can (as an escape)."""


class Frame(NamedTuple):
    """One message: its JSON header and its raw bytes."""

    header: Dict[str, Any]
    body: bytes = b""

    @property
    def type(self) -> str:
        """The message's kind: the header's "type"."""
        return str(self.header["type"])


def encode(header: Dict[str, Any], body: bytes = b"") -> bytes:
    """Return the bytes of one frame; "size" is filled in from `body`."""
    if len(body) > BODY_LIMIT:
        raise WireError(f"a body of {len(body)} bytes is over the limit of {BODY_LIMIT}")
    if body:
        header = dict(header, size=len(body))
    # Arguments and values may hold bytes that are not UTF-8; os.fsdecode made surrogates of them.
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
    try:
        data = text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        text = re.sub(_HALF_CHARACTER, lambda found: f"\\u{ord(found.group()):04x}", text)
        data = text.encode("utf-8", "surrogateescape")
    if len(data) > HEADER_LIMIT:
        raise WireError(f"a frame header of {len(data)} bytes is over the limit of {HEADER_LIMIT}")
    return _LENGTH.pack(len(data)) + data + body


def first(data: bytes) -> Tuple[Optional[Frame], bytes]:
    """Return the first frame of `data` and what comes after it; None and `data` if it is not whole.

    Raises:
        WireError: as `Decoder.feed`.
    """
    decoder = Decoder()
    for end in range(1, len(data) + 1):  # short frames of a handshake only
        frames = decoder.feed(data[end - 1 : end])
        if frames:
            return frames[0], data[end:]
    return None, data


class Decoder:
    """Cuts a byte stream into frames, whatever the pieces it arrives in."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> List[Frame]:
        """Add what arrived and return the frames that are now whole.

        Raises:
            WireError: the stream is not ours (length, JSON or "size" out of bounds); it cannot be resumed.
        """
        self._buffer += data
        frames: List[Frame] = []
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > HEADER_LIMIT:
                raise WireError(f"a frame header of {length} bytes was announced; the limit is {HEADER_LIMIT}")
            start = _LENGTH.size + length
            if len(self._buffer) < start:
                break
            header = _header(bytes(self._buffer[_LENGTH.size : start]))
            size = header.get("size", 0)
            if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= BODY_LIMIT:
                raise WireError(f"frame {header.get('type')!r} announces a body of {size!r} bytes")
            if len(self._buffer) < start + size:
                break
            body = bytes(self._buffer[start : start + size])
            del self._buffer[: start + size]
            frames.append(Frame(header, body))
        return frames

    @property
    def pending(self) -> int:
        """Bytes that arrived but do not make a whole frame yet."""
        return len(self._buffer)


def _header(text: bytes) -> Dict[str, Any]:
    try:
        header = json.loads(text.decode("utf-8", "surrogateescape"))
    except (ValueError, RecursionError) as err:  # the latter: brackets without end
        raise WireError(f"frame header is not JSON: {err}") from err
    if not isinstance(header, dict) or not isinstance(header.get("type"), str):
        raise WireError(f'frame header is not an object with a "type": {text!r:.80}')
    return header


UNNUMBERED = frozenset(("ping", "pong", "metrics", "resume", "received", "credit"))
"""Types of frames that are lost in a cut, and need not be sent again."""
CHUNK = 128 * 1024
"""Bytes of a large body in one frame. The protocol allows 1 MiB; a ping waits for one at most."""
WINDOW = 1024 * 1024
"""Bytes of large bodies that may be sent before the first `credit`, and that each one allows beyond what was taken."""
ACK_FRAMES = 64
ACK_BYTES = 256 * 1024
"""So much may come before `received` is said; it is also said with each ping."""
LIMIT = 64 * 1024 * 1024
"""Bytes that may be kept because the other side has not said that they came."""
WAITING = 64
"""Pings and the like that may wait to be written; the oldest is dropped."""

COORDINATOR = "coordinator"
AGENT = "agent"
"""Who proves to know the key of `begin`, where a new connection has to."""

Source = Union[bytes, BinaryIO, Iterable[bytes]]
"""Where a large body is: in memory, in a file (read from where it stands), or in pieces."""


_Kept = Tuple[int, bytes]
"""A numbered frame that the other side has not said to have: its number and its bytes."""


class Session:
    """One end of a session. Not for several threads at once.

    `connect` begins each connection, `cut` ends it.
    """

    def __init__(self) -> None:
        self.received = 0
        """Number of the last frame that came."""
        self.is_connected = False
        self.is_resumed = False
        """The connection is not the session's first, and the other side has said what it has."""
        self._decoder = Decoder()
        self._connections = 0
        self._is_resume_due = False
        self._said_resume = False
        self._awaits_resume = False
        """Nothing numbered may be sent: it is not known yet what the other side has."""
        # What leaves
        self._number = 0
        self._first: Deque[bytes] = deque()
        """Pings and the like."""
        self._unsent: Deque[_Kept] = deque()
        self._sent: Deque[_Kept] = deque()
        self._acked = 0
        self.held = 0
        """Bytes of frames that the other side has not said to have, sent or not; large bodies only as far as read."""
        self.unsent = 0
        """Bytes of frames that wait to be sent; not those of large bodies, and not pings."""
        self._large: Deque[_LargeBody] = deque()
        self._large_sent = 0
        """Bytes of large bodies in the whole session."""
        self._allowed = WINDOW
        # What comes
        self._told = 0
        """What `received` said last."""
        self._bytes = 0
        """Came since then."""
        self._is_ack_due = False
        self._taken = 0
        """Bytes of large bodies in the whole session."""
        self._granted = WINDOW
        """What `credit` said last."""
        self._is_credit_due = False

    @property
    def is_idle(self) -> bool:
        """Whether everything that was said was written, large bodies included."""
        return not (self._first or self._unsent or self._large)

    @property
    def is_behind(self) -> bool:
        """Whether pings and the like that were said wait to be written."""
        return bool(self._first)

    @property
    def is_ready(self) -> bool:
        """Whether `next` has something."""
        if not self.is_connected:
            return False
        if self._is_resume_due or self._is_ack_due or self._is_credit_due or self._first:
            return True
        return not self._awaits_resume and bool(self._unsent or self._may_send_chunk())

    @property
    def is_acknowledged(self) -> bool:
        """Whether the other side has said that it has everything."""
        return not (self._unsent or self._sent or self._large)

    # What leaves

    def say(self, header: Dict[str, Any], body: bytes = b"") -> None:
        """Have a frame sent; "seq" is filled in.

        Raises:
            WireError: the other side has not taken what was said before, and no more can be kept.
        """
        if header["type"] in UNNUMBERED:
            if self.is_connected:
                self._first.append(encode(header, body))
                if len(self._first) > WAITING:
                    self._first.popleft()
            return
        self._unsent.append(self._keep(header, body))
        self.unsent += len(self._unsent[-1][1])

    def send_large(self, header: Dict[str, Any], source: Source) -> None:
        """Have a large body sent in chunks, after the large bodies before it.

        The other side gets a frame for each: the header with "chunk" (the offset of this piece) and, in the last one,
        "last". If the source cannot be read on, the last one has "fault", the reason.
        """
        self._large.append(_LargeBody(header, source))

    def next(self) -> bytes:
        """Return the next frame to be written; nothing while there is none. What was returned counts as sent."""
        if not self.is_connected:
            return b""
        if self._is_resume_due:
            self._is_resume_due, self._said_resume = False, True
            return encode({"type": "resume", "received": self._told_received(), "credit": self._told_credit()})
        if self._is_ack_due:
            return encode({"type": "received", "seq": self._told_received()})
        if self._is_credit_due:
            return encode({"type": "credit", "bytes": self._told_credit()})
        if self._first:
            return self._first.popleft()
        if self._awaits_resume:
            return b""
        if self._unsent:
            kept = self._unsent.popleft()
            self.unsent -= len(kept[1])
        elif self._may_send_chunk():
            kept = self._chunk()
        else:
            return b""
        self._sent.append(kept)
        return kept[1]

    def forget_sent(self) -> None:
        """Keep nothing that was sent: it will not be acknowledged, and there will be no other connection."""
        self.held -= sum(len(data) for _, data in self._sent)
        self._sent.clear()

    def _told_received(self) -> int:
        self._is_ack_due = False
        self._told, self._bytes = self.received, 0
        return self.received

    def _told_credit(self) -> int:
        self._is_credit_due = False
        self._granted = self._taken + WINDOW
        return self._granted

    def _keep(self, header: Dict[str, Any], body: bytes) -> _Kept:
        data = encode(dict(header, seq=self._number + 1), body)
        if self.held + len(data) > LIMIT:
            count = len(self._sent) + len(self._unsent)
            raise WireError(
                f"the other side does not say that it has what was sent: {self.held} bytes in {count} frames are kept,"
                f" and {header['type']!r} with {len(data)} more is over the limit of {LIMIT}"
            )
        self._number += 1
        self.held += len(data)
        return self._number, data

    def _may_send_chunk(self) -> bool:
        return bool(self._large) and self._allowed - self._large_sent >= self._large[0].size

    def _chunk(self) -> _Kept:
        large = self._large[0]
        header, body = large.take()
        if large.is_over:
            self._large.popleft()
        self._large_sent += len(body)
        return self._keep(header, body)

    # What comes

    def feed(self, data: bytes) -> List[Frame]:
        """Add what has arrived; return the frames that are whole and new, without those of the session itself.

        Raises:
            WireError: this is no frame, or not of this session. It cannot be resumed.
        """
        return [frame for frame in self._decoder.feed(data) if self._take(frame)]

    def _take(self, frame: Frame) -> bool:
        """Take in one frame; return whether it is for who uses the session."""
        header = frame.header
        handler = _OWN.get(frame.type)
        if handler is not None:
            try:
                handler(self, header)
            except (KeyError, TypeError) as err:
                raise WireError(f"a malformed {frame.type!r} frame: {type(err).__name__}: {err}") from err
            return False
        seq = header.get("seq")
        if seq is None:
            # A ping, as a rule: the other side need not keep for longer what came before it.
            self._is_ack_due = self._is_ack_due or self.received > self._told
            return True
        if not isinstance(seq, int) or seq > self.received + 1:
            raise WireError(f"{frame.type!r} is frame {seq!r} of the session; the last one was {self.received}")
        if seq <= self.received:
            self._is_ack_due = True
            return False
        self.received = seq
        self._bytes += len(frame.body)
        is_enough = seq - self._told >= ACK_FRAMES or self._bytes >= ACK_BYTES
        self._is_ack_due = self._is_ack_due or is_enough or frame.type == "bye"
        if "chunk" in header:
            self._taken += len(frame.body)
            self._is_credit_due = self._granted - self._taken <= WINDOW // 2
        return True

    def _on_received(self, header: Dict[str, int]) -> None:
        seq = header["seq"]
        if not seq <= self._number - len(self._unsent):
            raise WireError(f"frame {seq} is said to have come; the last that was sent is {self._number}")
        while self._sent and self._sent[0][0] <= seq:
            self.held -= len(self._sent.popleft()[1])
        self._acked = max(self._acked, seq)

    def _on_credit(self, header: Dict[str, int]) -> None:
        self._allowed = max(self._allowed, header["bytes"])

    # Connections

    def connect(self) -> None:
        """Begin a connection: what is said goes there, what was lost in the last one first."""
        self.cut()
        self.is_connected = True
        self._connections += 1
        self._is_resume_due = self._awaits_resume = self._connections > 1

    def cut(self) -> None:
        """End the connection. What was said is kept, but for unnumbered frames."""
        self.is_connected = self.is_resumed = self._awaits_resume = self._said_resume = False
        self._is_resume_due = self._is_ack_due = self._is_credit_due = False
        self._first.clear()
        self._decoder = Decoder()

    def _on_resume(self, header: Dict[str, int]) -> None:
        received = header["received"]
        if received < self._acked:
            raise WireError(f"frames after {received} are asked for; those up to {self._acked} were said to have come")
        self._on_received({"seq": received})
        self._on_credit({"bytes": header["credit"]})
        # If this connection is our first, it was only the other side's that was cut.
        self._is_resume_due = not self._said_resume
        self._awaits_resume, self.is_resumed = False, True
        self.unsent += sum(len(data) for _, data in self._sent)
        self._unsent.extendleft(reversed(self._sent))
        self._sent.clear()


_OWN = {"received": Session._on_received, "credit": Session._on_credit, "resume": Session._on_resume}


class _LargeBody:
    """A large body that is being sent. The next chunk is always read ahead, to know whether it is the last."""

    def __init__(self, header: Dict[str, Any], source: Source) -> None:
        self.is_over = False
        self._header = header
        self._pieces = _pieces(source)
        self._offset = 0
        self._fault = ""
        self._next = self._read()

    @property
    def size(self) -> int:
        """Bytes of the next chunk."""
        return len(self._next)

    def take(self) -> Tuple[Dict[str, Any], bytes]:
        """Return the next chunk."""
        body = self._next
        header = dict(self._header, chunk=self._offset)
        self._offset += len(body)
        self._next = self._read()
        if not self._next:
            self.is_over = header["last"] = True
            if self._fault:
                header["fault"] = self._fault
        return header, body

    def _read(self) -> bytes:
        try:
            return next(self._pieces, b"")
        except Exception as err:  # whatever is wrong with it, the other side has to hear of it
            self._fault = str(err) or type(err).__name__
            return b""


def proof(key: str, who: str, agents_nonce: str, coordinators_nonce: str) -> str:
    """Return the proof that `who` (COORDINATOR or AGENT) knows `key`, hex: HMAC-SHA256 of its name and both nonces."""
    import hmac  # only where connections are resumed

    text = f"distrun session {who} {agents_nonce} {coordinators_nonce}"
    return hmac.new(key.encode(), text.encode(), "sha256").hexdigest()


def is_proof(given: str, key: str, who: str, agents_nonce: str, coordinators_nonce: str) -> bool:
    """Return whether `given` is that proof."""
    import hmac

    return hmac.compare_digest(given.encode(), proof(key, who, agents_nonce, coordinators_nonce).encode())


def _pieces(source: Source) -> Iterator[bytes]:
    """Yield a source in pieces of at most CHUNK bytes, none empty."""
    pieces: Iterable[bytes]
    if isinstance(source, bytes):
        pieces = (source,)
    elif hasattr(source, "read"):
        read = source.read
        pieces = iter(lambda: read(CHUNK), b"")
    else:
        pieces = source
    for piece in pieces:
        for start in range(0, len(piece), CHUNK):
            yield piece[start : start + CHUNK]
