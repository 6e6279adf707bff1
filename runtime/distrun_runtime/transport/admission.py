"""Admission: limits what a connection may do before its other side has proven that it belongs to the job.

libzmq bounds the size of a frame, but neither the number of frames in a message nor the number of connections. So a
stranger who only completes the ZMTP handshake can fill a node's memory with one message that never ends. Two limits
prevent it:

* The ZMTP handshake itself asks for a password (PLAIN, RFC 24, decided through ZAP, RFC 27) that is derived from the
  job's token. Without it libzmq hears nothing of a peer. Open jobs have a password that everybody knows: programs that
  speak ZeroMQ but another protocol (ps-lite) are recognised by their lack of it.
* Until the connection is proven (HELLO, `protocol.handshake`), it may send `UNPROVEN_BYTES` within `UNPROVEN_S`, and
  at most `UNPROVEN_CONNECTIONS` such connections are kept. What is beyond is closed.

The password crosses the network in clear, as all else does; it proves nothing by itself, and HELLO follows.

A connection is looked at before libzmq's first bytes leave on it, so that its other side still waits and can be told
apart: the listening socket is corked (TCP_CORK, which accepted connections inherit), and each connection is uncorked
when it was looked at. Byte counts come from TCP_INFO. Both are Linux's; elsewhere only the time and the number of
unproven connections are limited.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable

import zmq

from distrun_runtime.contract.dataclass import dataclass
from distrun_runtime.protocol.handshake import OPEN, TOKEN, auth_reason
from distrun_runtime.transport.base import Stranger

UNPROVEN_BYTES = 16384
"""More than HELLO and PROOF ever have."""
UNPROVEN_S = 10.0
"""How long a connection may stay unproven."""
UNPROVEN_CONNECTIONS = 256
"""How many unproven connections are kept; the oldest is closed when one more comes."""
_TOO_MANY = f"more than {UNPROVEN_CONNECTIONS} connections had proven nothing"
LAST_WORDS_S = 1.0
"""How long an answer (REFUSED) has to leave before its connection is closed."""

_SCAN_S = 0.02
"""How often unproven connections are looked at, while there are any."""
_EVENTS_KEPT = 64
"""Turned-away peers that wait to be told; more are counted."""
_BYTES_RECEIVED = 128
"""Offset of tcpi_bytes_received in Linux's struct tcp_info (since 4.1)."""
_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST = 4, 20, 1
"""Of linux/netlink.h and linux/sock_diag.h."""

WRONG_TOKEN, OTHER_KIND = "400", "500"
"""ZAP's status codes, as the opener hears them: another job's token; a token meets an open job, or the reverse."""
_MECHANISM_MISMATCH = int(zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH)
_SIGNATURE, _GREETING = 10, 64
"""Bytes of ZMTP's greeting (RFC 37): its first part, by which other protocols are told, and all of it."""


def credentials(token: bytes) -> tuple[bytes, bytes]:
    """Return user name and password of a node for ZMTP's PLAIN mechanism; pure.

    The password is the lower-case hex HMAC-SHA256 of `distrun zmtp 1`, keyed by the token: who hears it cannot prove
    the token. A job without a token is open to everybody, and so is its password.
    """
    if not token:
        return b"open", b"open"
    return b"token", hmac.new(token, b"distrun zmtp 1", "sha256").hexdigest().encode()


def judge(expected: tuple[bytes, bytes], user: bytes, password: bytes) -> tuple[str, str]:
    """Return ZAP's status code for a peer's credentials, and the reason if it is turned away; pure."""
    if user != expected[0]:
        if expected[0] == b"open":
            return OTHER_KIND, "it has a token, and this job runs open"
        return OTHER_KIND, "it runs open (no token), and this job has a token"
    if not hmac.compare_digest(password, expected[1]):
        return WRONG_TOKEN, "it does not know this job's token: it belongs to another job"
    return "200", ""


def refusal(token: bytes, status: int) -> str:
    """Return what a status code of the other side means for a node that has `token`, and what to do; pure."""
    if str(status) == WRONG_TOKEN:
        return "the other side does not know this job's token: it belongs to another job"
    return auth_reason(token, OPEN if token else TOKEN, "the other side")


@dataclass
class _Unproven:
    """A connection that came in."""

    held: socket.socket | None
    """The connection itself, under a second descriptor: the first is libzmq's, and may be closed and used again at any
    moment. None: it was gone before it could be looked at."""
    address: str
    is_same_user: bool | None
    cut_at: float
    """When it is closed, at the latest."""
    is_refused: bool = False
    """The node has told it why; that is all there is to say."""


class Admission:
    """The gate of one node's listening socket.

    A thread of its own answers ZAP and closes what exceeds the limits, so that a node whose own thread is busy is
    protected too.

    Threads: `strangers`, `proven` and `refused` may be called from any; everything else belongs to the thread that
    owns the ZeroMQ context.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], token: bytes, wake: Callable[[], None]) -> None:
        self._context = context
        self._credentials = credentials(token)
        self._wake = wake
        self._lock = threading.Lock()
        self._unproven: dict[int, _Unproven] = {}
        """By libzmq's descriptors, the oldest first."""
        self._port = 0
        self._zap: zmq.Socket[bytes] | None = None
        self._router: zmq.Socket[bytes] | None = None
        """The guarded socket."""
        self._monitor: zmq.Socket[bytes] | None = None
        """What libzmq reports of it."""
        self._is_foreign = False
        """The connection that is closed next asked for another mechanism."""
        self._is_broken = False
        """The connection that is closed next was ended by its other side, in the middle of ZMTP's handshake."""
        self.turned_away: list[Stranger] = []
        """What `strangers` returns next."""
        self._untold = 0
        self._stop_in, self._stop_out = socket.socketpair()
        self._thread: threading.Thread | None = None

    def opener(self, dealer: zmq.Socket[bytes]) -> None:
        """Give a socket that will connect this node's credentials."""
        dealer.plain_username, dealer.plain_password = self._credentials

    def acceptor(self, router: zmq.Socket[bytes]) -> None:
        """Guard a socket that will listen: call it before `bind`, and `start` after it."""
        router.plain_server = True
        router.zap_domain = b"distrun"
        if self._zap is None:
            self._zap = self._context.socket(zmq.ROUTER)
            self._zap.linger = 0
            self._zap.bind("inproc://zeromq.zap.01")
        failed = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        watched = zmq.EVENT_LISTENING | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | failed
        self._router = router
        reports = f"inproc://distrun-admission-{router.underlying}"
        router.monitor(reports, watched)
        self._monitor = self._context.socket(zmq.PAIR)
        self._monitor.rcvhwm = 0  # libzmq's input and output waits while its reports cannot be taken
        self._monitor.connect(reports)

    def start(self, port: int) -> None:
        """Begin: the guarded socket listens on `port`. Who came before waits for this."""
        self._port = port
        self._take_reports()
        self._thread = threading.Thread(target=self._run, name="distrun-admission", daemon=True)
        self._thread.start()

    def abandon(self) -> None:
        """The guarded socket could not be bound: guard another."""
        if self._monitor is not None and self._router is not None:
            # In this order: libzmq would wait for ever to report to no reader.
            self._router.disable_monitor()
            self._monitor.close(0)
            self._monitor = None

    def close(self) -> None:
        """Stop guarding, and close what is unproven; does nothing the second time. Call it before the guarded socket
        is closed."""
        if self._thread is not None:
            self._stop_out.send(b"s")
            self._thread.join()
            self._thread = None
        self.abandon()
        if self._zap is not None:
            self._zap.close(0)
            self._zap = None
        self._stop_in.close()
        self._stop_out.close()

    def strangers(self) -> list[Stranger]:
        """Return who was turned away since the last call."""
        with self._lock:
            found, self.turned_away = self.turned_away, []
            untold, self._untold = self._untold, 0
        if untold:
            found.append(Stranger("", f"{untold} more connections were closed for such reasons"))
        return found

    def proven(self, fd: int) -> None:
        """The connection that libzmq has as `fd` is proven: no limit holds for it any more."""
        with self._lock:
            entry = self._unproven.pop(fd, None)
            if entry is not None:
                _release(entry)

    def refused(self, fd: int) -> None:
        """The connection that libzmq has as `fd` was told why it is refused: close it in a moment."""
        with self._lock:
            if fd in self._unproven:
                entry = self._unproven[fd]
                entry.is_refused = True
                entry.cut_at = min(entry.cut_at, time.monotonic() + LAST_WORDS_S)

    # The gate's own thread

    def _run(self) -> None:
        zap, monitor = self._zap, self._monitor
        assert zap is not None
        poller = zmq.Poller()
        for source in (zap, monitor, self._stop_in):
            poller.register(source, zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll(int(_SCAN_S * 1000) if self._unproven else None))
                if self._stop_in.fileno() in ready:
                    break
                self._take_reports()
                while zap.poll(0):
                    # libzmq reports a connection before it asks for its password. So a connection that goes on with
                    # our answer is known here, and an earlier one that had its descriptor is forgotten.
                    self._take_reports()
                    self._answer(zap)
                self._scan(time.monotonic())
                if self.turned_away:
                    self._wake()
        finally:
            with self._lock:
                for entry in self._unproven.values():
                    _release(entry)
                self._unproven.clear()

    def _answer(self, zap: zmq.Socket[bytes]) -> None:
        # RFC 27: version, request id, domain, address, identity, mechanism, credentials.
        envelope, empty, version, request, _, address, _, mechanism, *given = zap.recv_multipart()
        is_plain = mechanism == b"PLAIN" and len(given) == 2
        status, reason = judge(self._credentials, given[0], given[1]) if is_plain else (WRONG_TOKEN, "no password")
        if reason:
            self._tell(Stranger(_unmapped(address.decode("ascii", "replace")), reason))
        zap.send_multipart([envelope, empty, version, request, status.encode(), reason.encode(), b"", b""])

    def _take_reports(self) -> None:
        """Act on what libzmq has reported of the guarded socket so far."""
        assert self._monitor is not None
        while self._monitor.poll(0):
            event, value = next_of(self._monitor)
            if event == zmq.EVENT_LISTENING:
                _cork(value, True)
            elif event == zmq.EVENT_ACCEPTED:
                entry = _look(value, self._port, time.monotonic())
                with self._lock:
                    self._unproven[value] = entry
            elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                # One input/output thread reports: the connection that is closed next is the one that this is about.
                self._is_foreign = value == _MECHANISM_MISMATCH
            elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                self._is_broken = True
            elif event == zmq.EVENT_DISCONNECTED:
                self._disconnected(value)

    def _disconnected(self, fd: int) -> None:
        is_foreign, is_broken = self._is_foreign, self._is_broken
        self._is_foreign = self._is_broken = False
        with self._lock:
            entry = self._unproven.pop(fd, None)
        if entry is None:
            return
        if is_broken and entry.held is not None:
            # Either side may notice first that the mechanisms differ. A peer that does has sent ZMTP's signature and at
            # most the rest of its greeting; its end counts as a byte.
            is_foreign = _SIGNATURE <= _received(entry.held) <= _GREETING + 1
        _release(entry)
        if is_foreign:
            reason = "it speaks ZeroMQ, but not as a node of distrun does"
            self._tell(Stranger(entry.address, reason, True, entry.is_same_user))

    def _scan(self, now: float) -> None:
        """Close what exceeds a limit."""
        closed: list[Stranger] = []
        with self._lock:
            surplus = len(self._unproven) - UNPROVEN_CONNECTIONS
            for number, entry in enumerate(self._unproven.values()):
                reason = _excess(entry, now) or (_TOO_MANY if number < surplus else "")
                if reason and entry.held is not None:
                    _cut(entry.held, resets=not entry.is_refused)
                    entry.held = None  # libzmq reports the end, and the entry goes then
                    if not entry.is_refused:
                        closed.append(Stranger(entry.address, reason))
        for stranger in closed:
            self._tell(stranger)

    def _tell(self, stranger: Stranger) -> None:
        with self._lock:
            if len(self.turned_away) < _EVENTS_KEPT:
                self.turned_away.append(stranger)
            else:
                self._untold += 1


def next_of(monitor: zmq.Socket[bytes]) -> tuple[int, int]:
    """Return the next event of a socket's monitor, and its value: a descriptor, a port or a status.

    zmq.utils.monitor has this, too, but loads asyncio for it: that is a tenth of a process's start.
    """
    head, _ = monitor.recv_multipart()
    event, value = struct.unpack("=Hi", head)
    return event, value


def _look(fd: int, port: int, now: float) -> _Unproven:
    """Return what is known of an accepted connection, keep it by a descriptor of our own, and let it go on."""
    own_fd = -1
    held: socket.socket | None = None
    try:
        own_fd = os.dup(fd)
        held = socket.socket(fileno=own_fd)
        here, there = held.getsockname(), held.getpeername()
        if port and here[1] != port:
            raise OSError("another connection: the descriptor was used again")
    except (OSError, IndexError, TypeError):
        if own_fd < 0:
            _cork(fd, False)  # this process has no descriptor left
        elif held is None:
            os.close(own_fd)
        else:
            held.close()
        return _Unproven(None, "", None, now + UNPROVEN_S)
    address, own = _unmapped(there[0]), _unmapped(here[0])
    is_same_user = _is_same_user((address, there[1]), (own, here[1])) if address == own else None
    _cork(held.fileno(), False)
    return _Unproven(held, address, is_same_user, now + UNPROVEN_S)


def _cork(fd: int, is_on: bool) -> None:
    """Hold back what is sent on a socket (of those that a listening socket accepts, too), or let it go."""
    if hasattr(socket, "TCP_CORK"):
        with contextlib.suppress(OSError):
            named = socket.socket(fileno=fd)
            try:
                named.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, int(is_on))
            finally:
                named.detach()


def _excess(entry: _Unproven, now: float) -> str:
    """Return which limit of a connection is exceeded, in words; empty: none."""
    if entry.held is not None and _received(entry.held) > UNPROVEN_BYTES:
        return f"it sent more than {UNPROVEN_BYTES} bytes before it had proven anything"
    return f"it had proven nothing for {UNPROVEN_S:g} s" if now >= entry.cut_at else ""


def _cut(connection: socket.socket, resets: bool) -> None:
    with contextlib.suppress(OSError):
        if resets:  # its other side may never stop sending
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def _release(entry: _Unproven) -> None:
    if entry.held is not None:
        entry.held.close()
        entry.held = None


def _received(connection: socket.socket) -> int:
    """Return how many bytes a connection has received; 0 where the system does not tell."""
    if not sys.platform.startswith("linux"):
        return 0
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED + 8)
    except OSError:
        return 0
    return int(struct.unpack_from("=Q", info, _BYTES_RECEIVED)[0]) if len(info) >= _BYTES_RECEIVED + 8 else 0


def _unmapped(address: str) -> str:
    """Return an IPv4 address that was written as IPv6 (::ffff:10.0.0.1) as what it is; pure."""
    return address[7:] if address.startswith("::ffff:") and "." in address else address


def _is_same_user(peer: tuple[str, int], here: tuple[str, int]) -> bool | None:
    """Return whether the other end of a connection within this machine is a socket of this user.

    The kernel is asked for exactly that socket (sock_diag(7)). One that is gone already has no owner: what cannot be
    verified is not believed. None: the system has no such question.
    """
    if not sys.platform.startswith("linux"):
        return None
    family = socket.AF_INET6 if ":" in peer[0] else socket.AF_INET
    ends = struct.pack(">HH", peer[1], here[1])
    ends += socket.inet_pton(family, peer[0]).ljust(16, b"\0") + socket.inet_pton(family, here[0]).ljust(16, b"\0")
    anything = struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)  # of any interface, with any cookie
    request = struct.pack("=BBBxI", family, socket.IPPROTO_TCP, 0, 0xFFFFFFFF) + ends + anything
    header = struct.pack("=IHHII", 16 + len(request), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 1, 0)
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
            kernel.settimeout(1.0)
            kernel.sendto(header + request, (0, 0))
            answer = kernel.recv(4096)
    except OSError:
        return False
    if len(answer) < 16 + 72 or struct.unpack_from("=H", answer, 4)[0] != _SOCK_DIAG_BY_FAMILY:
        return False
    # struct inet_diag_msg: four bytes, the two ends (48), then expires, rqueue, wqueue, uid, inode. A socket that its
    # process has closed has no inode.
    uid, inode = struct.unpack_from("=II", answer, 16 + 4 + 48 + 12)
    return bool(inode) and uid == os.geteuid()
