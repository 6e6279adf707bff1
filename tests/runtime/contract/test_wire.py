"""Frames: golden bytes, round trips, and what is refused."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distrun_runtime.contract import session
from distrun_runtime.errors import WireError

# Text as argv has it: any characters, and single bytes that are no UTF-8 (as surrogates U+DC80..U+DCFF).
texts = st.text(st.characters(exclude_categories=["Cs"]))
byte_words = st.binary(max_size=20).map(lambda data: data.decode("utf-8", "surrogateescape"))
numbers = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    st.none() | st.booleans() | numbers | texts | byte_words,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=10,
)
headers = st.builds(
    lambda kind, more: dict(more, type=kind),
    texts,
    st.dictionaries(texts.filter(lambda name: name not in ("type", "size")), values, max_size=5),
)
frames = st.tuples(headers, st.binary(max_size=2000))


def test_frame_is_length_header_and_body() -> None:
    """Golden: docs/protocol.md shows these bytes."""
    assert session.encode({"type": "ping", "n": 7}) == b'\x00\x00\x00\x15{"n":7,"type":"ping"}'
    header = {"type": "output", "task": "worker-0", "stream": "out", "offset": 5, "seq": 9}
    assert session.encode(header, b"hello\n") == (
        b'\x00\x00\x00N{"offset":5,"seq":9,"size":6,"stream":"out","task":"worker-0","type":"output"}hello\n'
    )


def test_bytes_that_are_no_utf8_travel_as_they_are() -> None:
    word = b"a\xff\xc3".decode("utf-8", "surrogateescape")
    data = session.encode({"type": "spawn", "env": {"X": word}})
    assert b'"X":"a\xff\xc3"' in data
    assert session.Decoder().feed(data)[0].header["env"]["X"] == word


# Two halves beside each other are the character for JSON: they come as that.
PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")


@given(st.lists(st.characters(categories=("Cs", "Lu")), max_size=6).map("".join).filter(lambda it: not PAIR.search(it)))
def test_any_text_travels_as_it_is_single_halves_of_characters_too(text: str) -> None:
    assert session.Decoder().feed(session.encode({"type": "t", "text": text}))[0].header["text"] == text


@given(st.lists(frames, max_size=4), st.data())
def test_frames_come_back_whatever_the_pieces(sent: list[tuple[dict[str, object], bytes]], data: st.DataObject) -> None:
    stream = b"".join(session.encode(header, body) for header, body in sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    decoder = session.Decoder()
    arrived = [
        frame
        for first, last in zip([0, *cuts], [*cuts, len(stream)], strict=True)
        for frame in decoder.feed(stream[first:last])
    ]
    assert decoder.pending == 0
    assert [(frame.body, frame.type) for frame in arrived] == [(body, header["type"]) for header, body in sent]
    for frame, (header, _) in zip(arrived, sent, strict=True):
        got = {name: value for name, value in frame.header.items() if name != "size"}
        assert session.encode(got) == session.encode(header), "the same bytes again"


@given(st.binary(max_size=200))
def test_any_bytes_give_frames_or_a_wire_error(data: bytes) -> None:
    try:
        for frame in session.Decoder().feed(data):
            assert isinstance(frame.header, dict)
    except WireError:
        pass


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\xff\xff\xff\xff", "the limit is"),
        (b"\x00\x00\x00\x02[]", "not an object"),
        (b"\x00\x00\x00\x02{}", '"type"'),
        (b"\x00\x00\x00\x03abc", "not JSON"),
        (b"\x00\x03\x0d\x40" + b"[" * 200_000, "not JSON"),
        (session.encode({"type": "x", "size": -1}), "body of -1"),
        (session.encode({"type": "x", "size": True}), "body of True"),
        (session.encode({"type": "x", "size": session.BODY_LIMIT + 1}), "body of"),
    ],
)
def test_what_is_no_frame_is_refused_with_the_reason(data: bytes, words: str) -> None:
    with pytest.raises(WireError, match=words):
        session.Decoder().feed(data)


def test_too_big_a_frame_is_refused_before_it_is_sent() -> None:
    with pytest.raises(WireError, match="over the limit"):
        session.encode({"type": "x"}, b"\0" * (session.BODY_LIMIT + 1))
