"""Frames between a coordinator and an agent.

A frame is a 4-byte big-endian length, that many bytes of JSON (an object, UTF-8), and then as many raw bytes
as the object's "size" says (none when it is absent). Both directions use the same frames, over any byte
stream: a pipe, an ssh channel, a socket. `docs/protocol.md` lists the messages; its golden bytes are tests.

Pure: nothing here reads or writes. `Decoder.feed` takes what arrived and gives back whole frames.
"""

from __future__ import annotations

import json
import re
import struct
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Tuple

from distrun_runtime.errors import WireError

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
    return head(dict(header, size=checked(len(body))) if body else header) + body


def checked(size: int) -> int:
    """Return a body's size. Raises WireError: it is over the limit."""
    if size > BODY_LIMIT:
        raise WireError("a body of %d bytes is over the limit of %d" % (size, BODY_LIMIT))
    return size


def head(header: Dict[str, Any]) -> bytes:
    """Return the bytes of a frame before its body."""
    # Arguments and values may hold bytes that are not UTF-8; os.fsdecode made surrogates of them.
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
    try:
        data = text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        text = re.sub(_HALF_CHARACTER, lambda found: f"\\u{ord(found.group()):04x}", text)
        data = text.encode("utf-8", "surrogateescape")
    if len(data) > HEADER_LIMIT:
        raise WireError("a frame header of %d bytes is over the limit of %d" % (len(data), HEADER_LIMIT))
    return _LENGTH.pack(len(data)) + data


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
        return list(self._frames())

    @property
    def pending(self) -> int:
        """Bytes that arrived but do not make a whole frame yet."""
        return len(self._buffer)

    def _frames(self) -> Iterator[Frame]:
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > HEADER_LIMIT:
                raise WireError("a frame header of %d bytes was announced; the limit is %d" % (length, HEADER_LIMIT))
            start = _LENGTH.size + length
            if len(self._buffer) < start:
                return
            header = _header(bytes(self._buffer[_LENGTH.size : start]))
            size = header.get("size", 0)
            if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= BODY_LIMIT:
                raise WireError("frame {!r} announces a body of {!r} bytes".format(header.get("type"), size))
            if len(self._buffer) < start + size:
                return
            body = bytes(self._buffer[start : start + size])
            del self._buffer[: start + size]
            yield Frame(header, body)


def _header(text: bytes) -> Dict[str, Any]:
    try:
        header = json.loads(text.decode("utf-8", "surrogateescape"))
    except (ValueError, RecursionError) as err:  # the latter: brackets without end
        raise WireError(f"frame header is not JSON: {err}") from err
    if not isinstance(header, dict) or not isinstance(header.get("type"), str):
        raise WireError('frame header is not an object with a "type": %.80r' % text)
    return header
