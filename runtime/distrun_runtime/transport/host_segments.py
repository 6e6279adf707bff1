"""Shared memory as a path for large frames: what is in a segment of ours is read by the other process where it is.

A process hands its segments (`arrays.shared_memory`) to a peer as descriptors over a Unix socket. That the peer is on
this host is not concluded from names or addresses; it is shown by the descriptor of a *board* that arrives and has the
right nonce in it.

    acceptor   offers a listening abstract Unix socket and a nonce, over the proven connection
    opener     connects to the socket, sends an HMAC of the nonce and its board's descriptor; answers that it did
    acceptor   takes the connection that has the HMAC, checks the board, sends back its own; answers that it did

Every step is told over the proven connection after what it tells of was written to the socket. So nothing here waits:
what is expected is there already, or does not come. An abstract socket belongs to a network namespace and leaves no
file. The peer must have our user id (SO_PEERCRED). See unix(7).

A message names its large frames as (segment, offset, length), and for all of them together a slot of the sender's board
and a generation. The receiver reads the memory in place, and writes the generation into the slot when nothing refers to
it any more; then the sender may write it again. If the other process dies, its end of the socket closes, and all that
it read is free.

docs/protocol.md has the bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import mmap
import os
import secrets
import select
import socket
import struct
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any

import numpy as np

from distrun_runtime.arrays.cores import touch
from distrun_runtime.arrays.dtypes import Array, Buffer
from distrun_runtime.arrays.gpu_frames import IN_USE, place_of, readable
from distrun_runtime.arrays.shared_memory import (
    BLOCKS,
    NONCE_BYTES,
    PAGE,
    Pool,
    Segment,
    address_of,
    close_unless_forked,
    has_fixed_size,
    seal,
)
from distrun_runtime.contract.dataclass import dataclass
from distrun_runtime.transport.base import NotShared
from distrun_runtime.transport.gpu_segments import GPU_SLOTS, GpuPeer, GpuSegments, Reference, offer_of

if TYPE_CHECKING:
    from distrun_runtime.arrays.gpu import GpuDevice
    from distrun_runtime.arrays.gpu_sharing import ReadExports

SLOTS = 4080
"""Messages to one peer whose memory may be in use at a time; the frames of what is beyond that are sent as bytes."""
BOARD_BYTES = 4 * PAGE
"""A board: the nonce, filled up to 64 bytes, and 32 bits for each slot."""
HOST_FRAMES = 2
"""Head and body of a message: the host reads them."""
_HEADER_BYTES = 64
_TEXT_BYTES = 256
_BACKLOG = 128
ACCEPT_S = 0.1
"""How often connections to our socket are accepted while no worker is expected there."""

_READS: dict[int, weakref.ref[Array]] = {}
"""Memory of others that this process refers to, each by the id of its reference, which tells when it no longer does.
`weakref.finalize` takes several times as long."""
_CREDENTIALS = struct.Struct("3i")
"""struct ucred of unix(7): process, user, group."""


_Found = tuple["weakref.ref[Buffer]", Segment, Reference]
"""A frame, which keeps its memory, and where that is."""


class _Board:
    """Where the receiver of references writes which of them it is done with."""

    def __init__(self, fd: int, memory: mmap.mmap) -> None:
        self.fd = fd
        self.nonce = bytes(memory[:NONCE_BYTES])
        self.slots: Array = np.frombuffer(memory, np.uint32, SLOTS, _HEADER_BYTES)
        weakref.finalize(self, close_unless_forked, fd, os.getpid()).atexit = False

    @classmethod
    def made(cls, nonce: bytes) -> _Board:
        """Return a new one.

        Raises:
            NotShared: this system has none.
        """
        fd = -1
        try:
            fd = os.memfd_create("distrun-board", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.posix_fallocate(fd, 0, BOARD_BYTES)
            memory = mmap.mmap(fd, BOARD_BYTES)
            memory[: len(nonce)] = nonce
            seal(fd, is_read_only=False)
        except (OSError, AttributeError) as err:
            if fd >= 0:
                os.close(fd)
            raise NotShared(f"this system has no shared memory of the kind: {err}") from err
        return cls(fd, memory)

    @classmethod
    def given(cls, fd: int, nonce: bytes) -> _Board:
        """Return one whose descriptor came from a peer.

        Raises:
            NotShared: it is none, or not the one with this nonce.
        """
        if fd < 0:
            raise NotShared("its board did not come")
        try:
            if os.fstat(fd).st_size != BOARD_BYTES or not has_fixed_size(fd):
                raise NotShared("what it sent is no board")
            board = cls(fd, mmap.mmap(fd, BOARD_BYTES))
        except (OSError, ValueError, NotShared) as err:
            os.close(fd)
            raise NotShared(f"its board cannot be used: {err}") from err
        if board.nonce != nonce:
            raise NotShared("its board has another nonce")
        return board


@dataclass(eq=False)
class _Peer:
    """A peer that memory is shared with."""

    socket: socket.socket
    out: _Board
    """Of our references; it writes."""
    into: _Board
    """Of its references; we write."""
    told: set[int] = field(default_factory=set)
    """Our segments whose descriptors it has."""
    mapped: dict[int, mmap.mmap] = field(default_factory=dict)
    """Its segments, by number."""
    free: list[int] = field(default_factory=lambda: list(range(GPU_SLOTS, SLOTS)))
    """Slots of messages in host memory; the first ones are of those on a GPU."""
    generation: int = 0
    gpu: GpuPeer = field(default_factory=GpuPeer)
    """What is shared with it of GPUs."""
    is_dropped: bool = False
    """Its link has ended: what it was to write is not waited for."""
    is_gone: bool = False
    """Its end of the socket is closed, so no process reads our memory any more."""

    def has_ended(self) -> bool:
        """Whether its link has ended, its end of the socket is closed, or its process begun to end. Threads: any."""
        if self.is_gone or self.is_dropped:
            return True
        ended = select.poll()
        with contextlib.suppress(OSError, ValueError):  # it was closed by now
            ended.register(self.socket, 0)
            return bool(ended.poll(0)) or _is_ending(_peer_of(self.socket)[0])
        return True

    def is_over(self) -> bool:
        """Whether it has gone; then the socket is closed. Call when its link has ended: what it sent is not read
        here."""
        try:
            while self.socket.recv(_TEXT_BYTES):
                pass
            self.is_gone = True
        except OSError as err:
            self.is_gone = not isinstance(err, (BlockingIOError, InterruptedError))
        if self.is_gone:
            self.socket.close()
        return self.is_gone


@dataclass(eq=False)
class SharedLease:
    """The lease of a message's shared frames: over when their receiver is done with all of them, or has gone."""

    peer: _Peer
    slot: int
    generation: int
    frames: Sequence[Buffer] | None
    """Kept, so that their memory is not given to another user meanwhile."""
    free: list[int]
    """Where the slot comes from."""

    @property
    def is_over(self) -> bool:
        """Whether the memory may be written again."""
        if self.frames is None:
            return True
        if self.peer.out.slots[self.slot] != self.generation and not self.peer.is_gone:
            return False
        self.take_back()
        return True

    def take_back(self) -> None:
        """The message was not sent."""
        if self.frames is not None:
            self.frames = None
            self.free.append(self.slot)

    def let_go(self) -> None:
        """The receiver is known to be done with the frames: their memory may be used at once, and only the slot waits
        until it says so."""
        if self.frames is not None:
            self.frames = ()


class Segments:
    """Shares this process's pools with peers, and reads theirs.

    Arguments:
        token: of the job.
        pools: what is in one of them can be shared.
        wake: called by any thread when there is memory of a GPU to be told of.

    Threads: one at a time, but for `is_open`, `peers` and `exports_to`.
    """

    def __init__(self, token: bytes, pools: Sequence[Pool], wake: Callable[[], None] = lambda: None) -> None:
        self._token = token
        self._pools = pools
        self._listener: socket.socket | None = None
        self._name = b""
        self._offered: dict[str, bytes] = {}
        """Nonces, by link."""
        self._came: dict[bytes, tuple[socket.socket, int]] = {}
        """By nonce: connections to our socket that have proven themselves, and the descriptors of their boards."""
        self._accept_at = 0.0
        """When connections to our socket are accepted next, by the monotonic clock, if not sooner for a worker."""
        self._silent: deque[socket.socket] = deque()
        """Connections to our socket that have said nothing yet."""
        self._tried: dict[str, tuple[socket.socket, _Board]] = {}
        """Links on which we took an offer."""
        self.peers: dict[str, _Peer] = {}
        """By link. Threads: any may ask whether a link is there."""
        self._ahead: list[Segment] = []
        """What of the pools was announced; to all peers, if no new one has come since."""
        self._has_new_peer = False
        self._given_back = 0
        """How many segments the pools had given back when peers were last told."""
        self._found: dict[int, _Found] = {}
        """By the ids of frames, as long as they are there."""
        self._leaving: list[_Peer] = []
        """Peers whose link has ended, and which may still read our memory."""
        self.gpu = GpuSegments(wake)
        """What of GPUs is shared."""

    # Getting to know each other

    def offer(self, link: str) -> dict[str, Any]:
        """Return what the opener of a proven connection needs in order to share memory with us.

        Raises:
            NotShared: this process cannot.
        """
        if self._listener is None:
            self._listen()
        nonce = secrets.token_bytes(NONCE_BYTES)
        self._offered[link] = nonce
        return {"socket": self._name.decode(), "nonce": nonce.hex()}

    def take(self, link: str, offer: Mapping[str, Any]) -> None:
        """Take an offer: connect to its socket, and prove who we are.

        Raises:
            NotShared: that did not work, so the peer is in another place, or there is no room.
        """
        nonce, name = bytes.fromhex(str(offer["nonce"])), str(offer["socket"]).encode()
        out = _Board.made(nonce)
        one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        # Where it is not reached, the address is of another network namespace, or no process listens.
        with _closing_unless_shared(one, "its socket cannot be reached from here"):
            one.connect(b"\0" + name)
            check_user(one)
            _tell(one, self._proof(nonce), out.fd)
        self._tried[link] = one, out

    def taken(self, link: str) -> None:
        """The opener has taken our offer.

        Raises:
            NotShared: it has not, or what it sent is wrong.
        """
        self._take_in()
        nonce = self._offered.pop(link, b"")
        found = self._came.pop(nonce, None)
        if found is None:
            raise NotShared("no process with the right proof came to the socket")
        one, fd = found
        with _closing_unless_shared(one, "our board cannot be sent"):
            into = _Board.given(fd, nonce)
            out = _Board.made(nonce)
            _tell(one, "", out.fd)
            self.peers[link], self._has_new_peer = _Peer(one, out, into), True

    def ready(self, link: str, reason: str) -> None:
        """The acceptor has looked at what we sent.

        Arguments:
            reason: why it does not share memory with us; empty: it does.

        Raises:
            NotShared: it does not, or its answer is wrong.
        """
        one, out = self._tried.pop(link)
        with _closing_unless_shared(one, "its board did not come"):
            if reason:
                raise NotShared(reason)
            into = _Board.given(_hear(one)[1], out.nonce)
            self.peers[link], self._has_new_peer = _Peer(one, out, into), True

    def is_open(self, link: str) -> bool:
        """Whether memory is shared with the other side of a link. Threads: any."""
        return link in self.peers

    def _listen(self) -> None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        self._name = b"distrun-%s" % secrets.token_hex(16).encode()
        with _closing_unless_shared(listener, "no abstract Unix socket"):
            listener.bind(b"\0" + self._name)
            listener.listen(_BACKLOG)
        self._listener = listener

    def _accept(self) -> None:
        """Accept who has connected to our socket, and close what is another user's. Any user of the host can connect,
        and connections that are not accepted would keep later ones away."""
        with contextlib.suppress(OSError):
            while self._listener is not None:
                one = self._listener.accept()[0]
                one.setblocking(False)
                try:
                    check_user(one)
                except NotShared:
                    one.close()
                else:
                    self._silent.append(one)
        while len(self._silent) > _BACKLOG:
            self._silent.popleft().close()

    def _take_in(self) -> None:
        """Take in who has connected to our socket; who has no proof of a nonce that we gave away is sent off."""
        self._accept()
        proofs = {self._proof(nonce): nonce for nonce in self._offered.values()}
        for _ in range(len(self._silent)):
            one = self._silent.popleft()
            text, fd = "", -1
            try:
                text, fd = _hear(one)
            except BlockingIOError:
                self._silent.append(one)  # It has connected, and is about to say who it is.
                continue
            except OSError:
                pass
            # Proofs are looked up by the digest of what came: how long that takes says nothing of the right ones.
            nonce = proofs.get(text)
            if nonce is None or fd < 0 or nonce in self._came:
                one.close()
                if fd >= 0:
                    os.close(fd)
                continue
            self._came[nonce] = one, fd

    def _proof(self, nonce: bytes) -> str:
        return hmac.new(self._token, b"distrun segments " + nonce, hashlib.sha256).hexdigest()

    # References

    def refer(self, link: str, frame: Buffer) -> Reference | None:
        """Return a reference to a frame for the other side of a link; None: it has to travel as bytes."""
        if IN_USE and (place := place_of(frame)) is not None:
            return self.gpu.refer(self.peers[link].gpu, frame, place)
        known = self._found.get(id(frame))
        if known is None or known[0]() is not frame:
            known = self._find(frame)
        return None if known is None or not _has(self.peers[link], known[1]) else known[2]

    def _find(self, frame: Buffer) -> _Found | None:
        """Return where a frame is that is in one of the pools. One that is sent again and again is looked for once."""
        address, size = address_of(frame), memoryview(frame).nbytes
        found = next(filter(None, (pool.find(address, size) for pool in self._pools)), None)
        if found is None:
            return None
        (segment, offset), number, places = found, id(frame), self._found
        watch = weakref.ref(frame, lambda _: places.pop(number, None))
        places[number] = watch, segment, Reference(segment.number, offset, size)
        return places[number]

    def announce(self) -> dict[str, list[int]]:
        """Send the descriptors of segments that peers are to map before a message names them.

        Returns:
            By link: the numbers of the segments that it is to be told of.
        """
        ahead: list[Segment] = []
        for pool in self._pools:
            ahead += pool.ahead
        if ahead == self._ahead and not self._has_new_peer:
            return {}
        self._ahead, self._has_new_peer = ahead, False
        told: dict[str, list[int]] = {}
        for link, peer in self.peers.items():
            for segment in ahead:
                if segment.number not in peer.told and _has(peer, segment):
                    told.setdefault(link, []).append(segment.number)
        return told

    def retract(self) -> dict[str, list[int]]:
        """Return which segments are no more.

        Returns:
            By link: the numbers of those of which it is to be told.
        """
        exports = self.gpu.exports if IN_USE else None
        given_back = 0 if exports is None else exports.given_back
        for pool in self._pools:
            pool.collect()
            given_back += pool.given_back
        if given_back == self._given_back:
            return {}
        self._given_back = given_back
        present = {number for pool in self._pools for number in pool.numbers}
        present |= {segment.number for segment in exports.segments} if exports is not None else set()
        told: dict[str, list[int]] = {}
        for link, peer in self.peers.items():
            gone = (peer.told | peer.gpu.told) - present
            for known in (peer.told, peer.gpu.told, peer.gpu.taken):
                known -= gone
            if gone:
                told[link] = sorted(gone)
        return told

    def lease(self, link: str, frames: Sequence[Buffer], *, is_on_gpu: bool = False) -> SharedLease | None:
        """Return what is over when the other side is done with the frames of a message; None: too many are in use.

        Arguments:
            is_on_gpu: some of them are on a GPU. An event is put behind what the GPU has to do so far.
        """
        peer = self.peers[link]
        free = peer.gpu.free if is_on_gpu else peer.free
        if not free or (is_on_gpu and not self.gpu.record(peer.gpu, free[-1])):
            return None
        peer.generation = peer.generation % 0xFFFFFFFF + 1
        lease = SharedLease(peer, free[-1], peer.generation, frames, free)
        del free[-1]  # Last, and no call: a signal handler that raises takes no slot along.
        return lease

    def fill(
        self, frames: list[Buffer], link: str, table: Sequence[tuple[int, ...]], slot: int, generation: int
    ) -> None:
        """Put the memory that a message of a peer names in the places of its frames: read-only, and valid as long as
        it is referenced.

        Arguments:
            table: the number of each frame, and the members of its `Reference`.

        Raises:
            NotShared: there is no such memory; the peer is at fault.
        """
        peer = self.peers.get(link)
        if peer is None or slot >= SLOTS:
            raise NotShared("no memory is shared with it")
        owners: dict[int, Array] = {}
        for frame, number, offset, length in table:
            if frame < HOST_FRAMES and number in peer.gpu.mapped:
                raise NotShared(f"frame {frame} of its message is on a GPU, where only payloads can be")
            owner = owners.get(number)
            if owner is None and number in peer.gpu.mapped:
                owner = owners[number] = self.gpu.frames(peer.gpu, number, slot, link, peer.has_ended)
            elif owner is None:
                self._map(peer, number)
                # One for all frames of the message in this segment: each of them keeps it.
                owner = owners[number] = np.frombuffer(peer.mapped[number], np.uint8)
            if offset + length > len(owner):
                raise NotShared(f"{length} bytes at {offset} of a segment of {len(owner)}")
            frames[frame] = owner[offset : offset + length].data
        slots, missing, pid, reads, getpid = peer.into.slots, len(owners), os.getpid(), _READS, os.getpid

        def release(read: weakref.ref[Array]) -> None:
            """Tell the sender, when nothing refers to frames of any of the segments any more."""
            nonlocal missing
            del reads[id(read)]
            missing -= 1
            # A forked child has the same objects; when it drops them, its parent may still read.
            if not missing and getpid() == pid:
                slots[slot] = generation

        for owner in owners.values():
            read = weakref.ref(owner, release)
            reads[id(read)] = read

    def map(self, link: str, numbers: Sequence[int]) -> None:
        """Map segments of a peer before it names them.

        Raises:
            NotShared: there are no such segments; the peer is at fault.
        """
        peer = self.peers.get(link)
        if peer is None:
            raise NotShared("no memory is shared with it")
        for number in numbers:
            self._map(peer, number)

    def unmap(self, link: str, numbers: Sequence[int]) -> None:
        """Unmap segments that a peer has given back. What refers to their memory keeps it.

        Raises:
            NotShared: as `map`.
        """
        gpu = self.peers[link].gpu if link in self.peers else GpuPeer()
        numbers = [number for number in numbers if not gpu.forget(number)]
        self.map(link, numbers)  # Their descriptors may not have been read yet.
        mapped = self.peers[link].mapped
        for number in numbers:
            BLOCKS.drop(mapped.pop(number))

    def _map(self, peer: _Peer, number: int) -> None:
        """Map the segments whose descriptors were sent, up to one that is named: it was sent before."""
        while number not in peer.mapped:
            self._receive(peer)

    def _receive(self, peer: _Peer) -> None:
        """Take in what was sent next on the socket of a peer."""
        try:
            text, fd = _hear(peer.socket)
        except OSError as err:
            raise NotShared(f"the descriptor of a segment did not come: {err.strerror or err}") from err
        if not text[:1].isdigit() and peer.gpu.takes(text, fd):
            return
        try:
            came, size = map(int, text.split())
            if fd < 0 or not has_fixed_size(fd) or (found := os.fstat(fd)).st_size != size:
                raise NotShared("what it sent is no segment")
            peer.mapped[came] = mmap.mmap(fd, size, prot=mmap.PROT_READ)
            if found.st_blocks * 512 >= size:  # a hole would become memory of this process
                touch(np.frombuffer(peer.mapped[came], np.uint8), is_written=False)
            BLOCKS.add(peer.mapped[came], is_readonly=True)
        except (OSError, ValueError) as err:
            raise NotShared(f"a segment cannot be mapped: {err}") from err
        finally:
            if fd >= 0:
                os.close(fd)  # The mapping stays.

    # GPUs

    def reachable(self, link: str, frames: Sequence[Buffer]) -> tuple[Sequence[Buffer], set[int]]:
        """Return frames with copies of those that are on a GPU where the other side of a link does not read them, and
        the numbers of those that it does read there."""
        peer, found, on_gpu = self.peers.get(link), list(frames), set[int]()
        for number, frame in enumerate(frames):
            place = place_of(frame)
            if place is not None and peer is not None and place.segment in peer.gpu.taken:
                on_gpu.add(number)
            elif place is not None:
                found[number] = readable(frame)
        return found, on_gpu

    def gpu_offers(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the links that are to be told of segments of a GPU, and what each is told."""
        for link, peer in self.peers.items() if IN_USE else ():
            for told in self.gpu.offers(peer.gpu, peer.socket):
                yield link, told

    def take_gpu(self, link: str, told: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Take an offer; yield what the peer is answered. Raises as `offer_of`."""
        peer, offer = self.peers[link], offer_of(told)
        while offer.number not in peer.gpu.fds:
            self._receive(peer)
        peer.gpu.known.add(offer.number)
        peer.gpu.offered[offer.number] = offer
        yield from self.gpu.answers(peer.gpu, peer.has_ended)

    def retry_gpus(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield answers to offers that could not be taken before, as this process did not use the GPU."""
        for link, peer in self.peers.items():
            if peer.gpu.offered:
                for told in self.gpu.answers(peer.gpu, peer.has_ended, again=True):
                    yield link, told

    def gpu_answered(self, link: str, told: Mapping[str, Any]) -> str:
        """A peer has answered an offer; return why it does not read that segment; empty: it does."""
        return self.gpu.answered(self.peers[link].gpu, told)

    def exports_to(self, links: Iterable[str], gpu: GpuDevice) -> ReadExports | None:
        """Return memory of a GPU that the other sides of links read where it is; None: of none. Threads: any."""
        exports = self.gpu.exports
        if exports is None or exports.gpu is not gpu:
            return None
        peers = map(self.peers.get, links)
        taken = [frozenset[int]() if peer is None else frozenset(peer.gpu.taken) for peer in peers]
        numbers = frozenset[int].intersection(*taken) if taken else frozenset[int]()
        return exports.among(numbers) if numbers else None

    # The end

    def drop(self, link: str) -> None:
        """A link has ended. What its other side still reads stays in use until that process has gone."""
        self._offered.pop(link, None)
        tried = self._tried.pop(link, None)
        if tried is not None:
            tried[0].close()
        peer = self.peers.pop(link, None)
        if peer is not None:
            for memory in peer.mapped.values():
                BLOCKS.drop(memory)
            peer.mapped.clear()
            peer.gpu.close()
            peer.is_dropped = True
            self._leaving.append(peer)

    def look(self) -> None:
        """Look which of the peers whose links have ended have gone, and who has connected to our socket."""
        now = time.monotonic()
        if now >= self._accept_at:
            self._accept_at = now + ACCEPT_S
            self._accept()
        if self._leaving:
            self._leaving = [peer for peer in self._leaving if not peer.is_over()]
        if IN_USE:
            self.gpu.collect()

    def close(self) -> None:
        """Share nothing any more."""
        for one, fd in self._came.values():
            one.close()
            os.close(fd)
        self._came.clear()
        while self._silent:
            self._silent.popleft().close()
        for link in [*self._tried, *self.peers]:
            self.drop(link)
        for peer in self._leaving:
            peer.is_gone = True
            peer.socket.close()
        self._leaving.clear()
        self.gpu.close()
        if self._listener is not None:
            self._listener.close()
            self._listener = None


@contextlib.contextmanager
def _closing_unless_shared(one: socket.socket, failure: str) -> Iterator[None]:
    """Close a socket by which memory cannot be shared.

    Raises:
        NotShared: why not; of an error of the system, with `failure`.
    """
    try:
        yield
    except (NotShared, OSError) as err:
        one.close()
        raise NotShared(f"{failure}: {err.strerror or err}" if isinstance(err, OSError) else str(err)) from err


def _has(peer: _Peer, segment: Segment) -> bool:
    """Whether a peer has a segment's descriptor, once it was sent if it has not."""
    if segment.number not in peer.told:
        try:
            _tell(peer.socket, f"{segment.number} {segment.size}", segment.fd)
        except OSError:
            return False  # The socket is full of descriptors that were not read, or its other end is closed.
        peer.told.add(segment.number)
    return True


def _tell(one: socket.socket, text: str, fd: int) -> None:
    socket.send_fds(one, [text.encode()], [fd], socket.MSG_NOSIGNAL)


def _hear(one: socket.socket) -> tuple[str, int]:
    """Return a text and a descriptor that came; -1: none came with it."""
    data, fds, _, _ = socket.recv_fds(one, _TEXT_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
    for fd in fds[1:]:
        os.close(fd)
    return data.decode("ascii", "replace"), fds[0] if fds else -1


def is_shared(frame: Buffer) -> bool:
    """Whether a frame is memory of its sender (`Segments.fill`); what is received into an array can be written."""
    view = memoryview(frame)
    return view.readonly and isinstance(view.obj, np.ndarray)


def check_user(one: socket.socket) -> None:
    """Look whose process is at the other end of a Unix socket.

    Raises:
        NotShared: another user's.
    """
    user = _peer_of(one)[1]
    if user != os.geteuid():
        raise NotShared(f"the process at the socket belongs to user {user}")


def _peer_of(one: socket.socket) -> tuple[int, int]:
    """Return the ids of the process at the other end of a Unix socket, 0 if it cannot be seen here, and of its user."""
    pid, user, _ = _CREDENTIALS.unpack(one.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, user


def _is_ending(pid: int) -> bool:
    """Whether a process has begun to end: it gives up its program before its files, of which a GPU is one, and of which
    a child of it may keep some."""
    try:
        return pid > 0 and not os.readlink(f"/proc/{pid}/exe")
    except OSError as err:
        return not isinstance(err, PermissionError)
