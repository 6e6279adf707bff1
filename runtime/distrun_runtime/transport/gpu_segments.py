"""Memory of GPUs as a path for frames: segments of one process that another one on the same GPU reads where they are.

It goes with the segments of host memory (`host_segments`): over the same socket, with the same references and the same
slots, by which the receiver says that it is done. What is different:

* Whether it works is only known when it was tried: a process may use another GPU, or another part of it, or may not be
  let at it. So each segment is offered, and used when the other side says that it has read the nonce in it.
* The bytes of a message may not be there yet when it arrives. Each slot has an event, which the sender records behind
  its GPU's work before it sends. The receiver waits for it before it uses the values.

A process offers memory of one GPU: a server of the one on which its first store is, a worker of the one of which a
server offers memory. docs/protocol.md has the bytes.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Any, NamedTuple

from distrun_runtime.arrays.dtypes import Array, Buffer
from distrun_runtime.arrays.gpu_frames import FramePlace, SegmentOffer
from distrun_runtime.arrays.shared_memory import NONCE_BYTES, address_of
from distrun_runtime.contract.dataclass import dataclass
from distrun_runtime.errors import KVError
from distrun_runtime.transport.base import NotShared

if TYPE_CHECKING:  # Most processes use no GPU.
    from distrun_runtime.arrays.cuda import Event
    from distrun_runtime.arrays.gpu import GpuDevice
    from distrun_runtime.arrays.gpu_sharing import GpuExports, GpuMapping, GpuSharing

GPU_SLOTS = 128
"""So many messages to a peer may have frames on a GPU at a time; each has an event, of which CUDA has few."""
MEMORY, EVENT = "gpu", "event"
"""First words of what is sent on the socket: of a descriptor, `gpu NUMBER`; of a slot's event, `event SLOT NAME`."""


class Reference(NamedTuple):
    """Bytes in a segment of the sender."""

    segment: int
    offset: int
    length: int


def offer_of(told: Mapping[str, Any]) -> SegmentOffer:
    """Return what a GPU_OFFER says.

    Raises:
        NotShared: that is no offer; the peer is at fault. Or a KeyError, TypeError or ValueError.
    """
    from distrun_runtime.arrays.cuda import EVENT_NAME_BYTES, SHARED_UNIT

    nonce, event = bytes.fromhex(told["nonce"]), bytes.fromhex(told["event"])
    number, size = told["number"], told["size"]
    are_numbers = type(number) is int and type(size) is int and number >= 0 < size < 1 << 63
    if not are_numbers or size % SHARED_UNIT or (len(nonce), len(event)) != (NONCE_BYTES, EVENT_NAME_BYTES):
        raise NotShared(f"what it offers of a GPU is no segment: {dict(told)!r:.400}")
    return SegmentOffer(number, size, str(told["uuid"]), nonce, event)


@dataclass(eq=False)
class GpuPeer:
    """What is shared of GPUs with one peer."""

    told: set[int] = field(default_factory=set)
    """Our segments that it was offered."""
    taken: set[int] = field(default_factory=set)
    """Those that it reads."""
    events: dict[int, Event] = field(default_factory=dict)
    """Ours, by slot; it has their names."""
    free: list[int] = field(default_factory=list)
    """Slots that have an event and are not in use."""
    fds: dict[int, int] = field(default_factory=dict)
    """Descriptors of its segments that were not mapped yet, by number."""
    known: set[int] = field(default_factory=set)
    """Numbers of the segments that it has offered, until it gives them back; whether they are read here or not."""
    offered: dict[int, SegmentOffer] = field(default_factory=dict)
    """Its offers that are not taken yet."""
    mapped: dict[int, GpuMapping] = field(default_factory=dict)
    """Its segments, by number."""
    names: dict[int, bytes] = field(default_factory=dict)
    """Of its events, by slot."""
    opened: dict[int, Event] = field(default_factory=dict)
    """Its events, by slot."""

    def takes(self, text: str, fd: int) -> bool:
        """Take in what came on the socket, if it is of a GPU; tell whether it was."""
        word, _, rest = text.partition(" ")
        if word == MEMORY and fd >= 0 and rest.isdigit() and int(rest) not in {*self.fds, *self.known}:
            self.fds[int(rest)] = fd
        elif word == EVENT and fd < 0:
            slot, _, name = rest.partition(" ")
            self.names[int(slot)] = bytes.fromhex(name)
        else:
            return False
        return True

    def forget(self, number: int) -> bool:
        """Forget a segment that it has given back, if it is one of a GPU; tell whether it is."""
        if number not in self.known:
            return False
        self.known.remove(number)
        self.offered.pop(number, None)
        self.mapped.pop(number, None)
        if number in self.fds:
            os.close(self.fds.pop(number))
        return True

    def close(self) -> None:
        """Map nothing any more. What refers to mapped memory keeps it."""
        for fd in self.fds.values():
            os.close(fd)
        for known in (self.taken, self.fds, self.known, self.offered, self.mapped, self.opened):
            known.clear()


class GpuSegments:
    """What this process shares of its GPUs. Threads: one at a time, but for `exports`.

    Arguments:
        wake: called by any thread when peers are to be told of a new segment.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._sharing: GpuSharing | None = None
        self.why_not = ""
        """Why no memory is offered, until peers' links were told."""
        self._lock = threading.Lock()

    @property
    def exports(self) -> GpuExports | None:
        """Memory of a GPU that is offered; None: there is none."""
        return None if self._sharing is None else self._sharing.exports

    def open(self, gpu: GpuDevice) -> None:
        """Have memory of a GPU offered from now on, if there is none yet. Threads: any."""
        sharing = self._opened()
        with self._lock:
            if not sharing.why_not:
                sharing.open(gpu)
                self.why_not = sharing.why_not

    def _opened(self) -> GpuSharing:
        from distrun_runtime.arrays.gpu_sharing import GpuSharing

        with self._lock:
            if self._sharing is None:
                self._sharing = GpuSharing(self._wake)
            return self._sharing

    def close(self) -> None:
        """Offer no memory any more. Those who have it mapped keep it."""
        with contextlib.suppress(KVError):  # A GPU that has failed is told by the calls that use it.
            if self.exports is not None:
                self.exports.close()

    # Ours

    def offers(self, peer: GpuPeer, one: socket.socket) -> Iterator[dict[str, Any]]:
        """Send a peer the descriptors of segments that it has not been offered; yield what it is told of each."""
        exports = self.exports
        if exports is None:
            return
        for segment in exports.segments:
            if segment.number in peer.told:
                continue
            if not peer.told and not self._make_events(exports, peer, one):
                return
            with exports.descriptors:
                if segment not in exports.segments:
                    continue  # It was given back meanwhile.
                try:
                    socket.send_fds(one, [f"{MEMORY} {segment.number}".encode()], [segment.fd], socket.MSG_NOSIGNAL)
                except OSError:
                    return  # The socket is full, or its other end is closed.
                peer.told.add(segment.number)
            uuid = self._opened().uuid_of(exports.gpu)
            names = {"nonce": segment.nonce.hex(), "event": segment.event_name.hex()}
            yield {"number": segment.number, "size": segment.pointer.nbytes, "uuid": uuid, **names}

    def answered(self, peer: GpuPeer, told: Mapping[str, Any]) -> str:
        """A peer has answered an offer; return why it does not read that segment; empty: it does."""
        if not told["reason"]:
            peer.taken.add(int(told["number"]))
        return str(told["reason"])

    def refer(self, peer: GpuPeer, frame: Buffer, place: FramePlace) -> Reference | None:
        """Return a reference to a frame of ours; None: the peer cannot read it."""
        if place.segment not in peer.taken:
            return None
        return Reference(place.segment, place.offset + address_of(frame) - place.address, memoryview(frame).nbytes)

    def _make_events(self, exports: GpuExports, peer: GpuPeer, one: socket.socket) -> bool:
        """Make the events for messages to a peer, as far as CUDA has them, and send their names; False: not all were
        sent so far."""
        for slot in range(len(peer.events), GPU_SLOTS):
            try:
                event, name = exports.order.cuda.share_event(exports.gpu.physical)
                one.send(f"{EVENT} {slot} {name.hex()}".encode(), socket.MSG_NOSIGNAL)
            except KVError as err:
                self.why_not = str(err)
                break
            except OSError:
                return False  # The socket is full, or its other end is closed.
            peer.events[slot] = event
            peer.free.append(slot)
        return True

    def record(self, peer: GpuPeer, slot: int) -> bool:
        """Put the event of a slot behind all that the GPU has to do so far; False: that cannot be.

        Raises:
            CudaError: the GPU has failed for good.
        """
        exports = self.exports
        assert exports is not None
        try:
            exports.record(peer.events[slot])
        except KVError:
            exports.order.cuda.check()
            return False
        return True

    # A peer's

    def answers(self, peer: GpuPeer, has_ended: Callable[[], bool], *, again: bool = False) -> Iterator[dict[str, Any]]:
        """Map the segments that a peer has offered, as far as that can be now; yield what it is answered.

        Arguments:
            has_ended: whether its process, or the connection with it, has ended.
            again: what cannot be mapped yet was told before.
        """
        from distrun_runtime.arrays import device as devices

        for number, offer in list(peer.offered.items()):
            reason = ""
            gpu = self._opened().gpu_of(offer.uuid) if devices.opened() else None
            if gpu is None:
                if not again:
                    yield {"number": number, "reason": f"this process does not use the GPU of UUID {offer.uuid} so far"}
                continue
            try:
                mapping = self._opened().map(offer, gpu, peer.fds[number], has_ended)
                if mapping is None:
                    continue
                cuda = devices.gpus().order.cuda
                for slot in peer.names.keys() - peer.opened.keys():
                    peer.opened[slot] = cuda.open_event(gpu.physical, peer.names[slot])
                peer.mapped[number] = mapping
            except (KVError, OSError) as err:
                reason = str(err)
            del peer.offered[number]
            os.close(peer.fds.pop(number))
            yield {"number": number, "reason": reason}
            if not reason:
                self.open(peer.mapped[number].gpu)

    def frames(self, peer: GpuPeer, number: int, slot: int, who: str, has_ended: Callable[[], bool]) -> Array:
        """Return the bytes of a segment, for a message that names it.

        Raises:
            NotShared: its slot has no event.
        """
        from distrun_runtime.arrays.gpu_sharing import Arrival

        if slot not in peer.opened:
            raise NotShared(f"slot {slot} has no event")
        return peer.mapped[number].frames(Arrival(f"the process at {who}", peer.opened[slot], has_ended))

    def collect(self) -> None:
        """Let go of what was read, and unmap what is not needed any more."""
        if self._sharing is not None:
            with contextlib.suppress(KVError):  # A GPU that has failed is told by the calls that use it.
                self._sharing.collect()
