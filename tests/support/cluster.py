"""A whole job in threads of one process: scheduler, servers and workers over real sockets or in-process queues."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from forgetful import Forgetful
from inproc import InprocNetwork
from scripted_transport import Stepped
from slowness import scaled

from distrun_runtime.arrays import device as devices
from distrun_runtime.arrays.shared_memory import Pool
from distrun_runtime.kvstore import KVStore
from distrun_runtime.ps import engine as engines
from distrun_runtime.ps.counters import Counters
from distrun_runtime.ps.engine import WorkEngine
from distrun_runtime.ps.loop import Loop
from distrun_runtime.ps.node import bind, placement_of, wrapped
from distrun_runtime.ps.role import Config
from distrun_runtime.ps.scheduler import Scheduler
from distrun_runtime.ps.server import Server
from distrun_runtime.ps.session import ExportedMemory, NodeSession
from distrun_runtime.ps.steady import Steady
from distrun_runtime.ps.trace import Recorder, Trace
from distrun_runtime.store.dist import DistBackend
from distrun_runtime.store.link import group_of
from distrun_runtime.transport.base import Heartbeat, Transport
from distrun_runtime.transport.direct import DirectTransport
from distrun_runtime.transport.faults import Faults
from distrun_runtime.transport.host_paths import BulkTransport
from distrun_runtime.transport.zeromq import ZmqTransport

DEADLINE_S = scaled(100.0)
"""Beyond every deadline that a test sets, and below that of the test itself, also on a slow machine."""

TOKEN = b"a secret of this job"

PATHS = {
    **{"inproc": "inproc", "tcp": "zmq", "segments": "segments", "relays": "relays over tcp"},
    "direct": "direct",
}
"""The ways that messages may take, and what `Cluster` calls them (`over`). A scenario has to pass on each."""

END_S = scaled(20.0)
"""How long scheduler and servers have to end by themselves when the workers have."""

PARTITION: str | None = None
"""How values are placed where the fixture `placement` says so."""


SERVER_DEVICE: str | None = None
"""Where servers are to keep values (`distrun launch --server-device`), where the fixture `server_device` says so."""

AS_GROUP = False
"""Whether stores of all workers are made as those of a group that has all of them; the fixture `job` has it so on one
path."""

MUCH_BYTES = engines.MUCH_BYTES
"""How much work is done by a server's engine in its own thread; the fixture `engine` has all done there."""


def config(role: str, **changes: Any) -> Config:
    """Return a node's configuration on this machine; `changes` replace fields.

    With a `bigarray_bound` values lie where MXNet has them, unless `partition` says otherwise: small ones are cut, too.
    """
    usually = "mxnet" if "bigarray_bound" in changes else "size"
    usual = Config(
        role=role,
        rank=-1,
        job="test-job",
        workers=2,
        servers=2,
        root="127.0.0.1",
        root_port=0,
        address="127.0.0.1",
        host="here",
        token=TOKEN,
        incarnation=0,
        heartbeat=Heartbeat(0.5, 30.0),
        start_timeout_s=scaled(60.0),
        op_timeout_s=scaled(60.0),
        bigarray_bound=1000000,
        verbose=0,
        faults=Faults(),
        partition=PARTITION or usually,
    )
    if SERVER_DEVICE is not None:
        usual = replace(usual, server_device=SERVER_DEVICE)
    return replace(usual, **changes)


def open_store(
    type_name: str,
    session: NodeSession,
    staleness: int | None = None,
    *,
    deterministic: bool = False,
    group: str | None = None,
    members: Sequence[int] | None = None,
) -> KVStore:
    """Return a store of the job of an open session, as `kvstore.create` makes it in a worker process."""
    if AS_GROUP and group is None:
        group, members = "all workers", range(session.config.workers)
    shared_by = None if group is None else group_of(session, group, members)
    return KVStore(DistBackend(type_name, session, staleness, deterministic, shared_by))


def loop_of(
    node: Any, transport: Any, engine: Any = None, *, token: bytes = TOKEN, out: Any = None, **more: Any
) -> Loop:
    """Return the loop of a scheduler or server; `out` gets its log (stderr)."""
    return Loop(transport, node, token, Trace(0, lambda: node.me, out), engine=engine, **more)


def server_loop(
    own: Config, transport: Any, endpoint: str, imports: Sequence[str] = (), memory: Pool | None = None, **more: Any
) -> Loop:
    """Return the loop of a server with its arithmetic, as `ps.node` puts them together; `more` is `loop_of`'s."""
    counters, recorder = Counters(), Recorder()
    server = Server(own, endpoint, counters, recorder)
    host = devices.get("cpu:0", memory=memory)
    placement = placement_of(own, host)
    placement.open()
    engine = WorkEngine(host, counters, recorder, imports, placement=placement, much_bytes=MUCH_BYTES)
    if isinstance(transport, Stepped):
        transport.is_busy = lambda: engine.under_way > 0
    known = Steady(server, engine, counters)
    loop = loop_of(server, transport, engine=engine, known=known, token=own.token, **more)
    if isinstance(transport, BulkTransport):
        transport.pour(loop.take, loop.take_bytes)
        if transport.direct is not None:
            loop.send_small = transport.direct.send
    return loop


class Cluster:
    """Scheduler and servers in threads; `run` adds the workers."""

    def __init__(
        self,
        workers: int = 2,
        servers: int = 2,
        *,
        over: str = "zmq",
        network: InprocNetwork | None = None,
        imports: tuple[str, ...] = (),
        forget_every: int = 0,
        **changes: Any,
    ) -> None:
        """`forget_every`: servers do not know the bucket of every so many-th message that names one (`Forgetful`)."""
        self.network = network or InprocNetwork()
        self._pools: dict[str, Pool] = {}
        self._over = over
        self._changes = {"workers": workers, "servers": servers, **changes}
        self._threads: list[threading.Thread] = []
        self.codes: dict[str, int] = {}
        own = self._config("scheduler")
        root = self._transport(own)
        endpoint = bind(root, own)
        self.root_port = int(endpoint.rpartition(":")[2])
        self.scheduler = Scheduler(own, endpoint)
        self._loops: dict[threading.Thread, Loop] = {}
        self._start("scheduler", loop_of(self.scheduler, root, token=self._changes.get("token", TOKEN)))
        self.transports: dict[str, Any] = {"scheduler": root}
        for rank in range(servers + changes.get("relays", 0)):
            node = self._config("server", rank=rank, root_port=self.root_port)
            transport = self._transport(node)
            if forget_every:
                transport = Forgetful(transport, forget_every)
            self.transports["server-%d" % rank] = transport
            endpoint = bind(transport, node)
            loop = server_loop(node, transport, endpoint, imports, memory=self._pool_of(node))
            self._start("server-%d" % rank, loop)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()

    @property
    def has_relays(self) -> bool:
        """Whether values for servers of another host go over relays."""
        return self._over.startswith("relays")

    def session(self, rank: int = -1, **changes: Any) -> NodeSession:
        """Return a worker's session, not opened yet."""
        node = self._config("worker", **{"rank": rank, "root_port": self.root_port, **changes})
        pool, transport = self._pool_of(node), self._transport(node)
        del self._pools["worker-%d" % rank]  # It is closed with the session; the next one of this rank has its own.
        return NodeSession(node, transport, ExportedMemory(pool, pool))

    def run(
        self, script: Callable[[KVStore], Any], type_name: str = "dist_sync", staleness: int | None = None
    ) -> list[Any]:
        """Run `script(kv)` in every worker; return what each returned, by rank. The first error is raised."""

        def work(session: NodeSession) -> Any:
            return script(open_store(type_name, session, staleness))

        return self.run_sessions(work)

    def run_sessions(self, script: Callable[[NodeSession], Any]) -> list[Any]:
        """Run `script(session)` in every worker, the session open; return what each returned, by rank."""
        workers = self._changes["workers"]
        results: list[Any] = [None] * workers
        errors: list[BaseException] = []

        def body(rank: int) -> None:
            session = self.session(rank)
            try:
                session.open()
                self._share(session)
                results[rank] = script(session)
            except BaseException as err:
                errors.append(err)
                session.note_crash(err)
            finally:
                session.end()

        threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
        assert not any(thread.is_alive() for thread in threads), "workers did not end within %g s" % DEADLINE_S
        if errors:
            raise errors[0]
        return results

    def finish(self) -> None:
        """Wait until scheduler and servers have ended by themselves; end them otherwise."""
        for thread in self._threads:
            thread.join(0.0 if self._changes.get("stays") else END_S)
        for thread, loop in self._loops.items():
            if thread.is_alive():
                loop.tell(15)
                thread.join(DEADLINE_S)
        assert not any(thread.is_alive() for thread in self._threads)

    def _config(self, role: str, **changes: Any) -> Config:
        """Return the configuration of a node of this job."""
        rank = changes.get("rank", -1)
        host = {"host": host_of(role, rank)} if self.has_relays and rank >= 0 else {}
        return config(role, **{**host, **self._changes, **changes})

    def _transport(self, node: Config) -> Any:
        if self._over in ("inproc", "relays"):
            return wrapped(self.network.transport(), node)
        plain = ZmqTransport(node.heartbeat, node.token)
        transport: Transport = plain
        if self._over == "direct":
            transport = DirectTransport(plain, node.token)
        if self._over in ("segments", "direct") and node.role != "scheduler":
            pools = [self._pool_of(node)]
            transport = BulkTransport(transport, node.token, pools, offers=node.role == "server", large_bytes=1)
        return wrapped(transport, node)

    def _share(self, session: NodeSession) -> None:
        """Wait until the servers read the memory of a worker, where they are to do so."""
        deadline = time.monotonic() + DEADLINE_S
        while self._over in ("segments", "direct") and not all(session.staging(name) for name in session.value_servers):
            assert time.monotonic() < deadline, "no shared memory came about"
            time.sleep(0.002)

    def _pool_of(self, node: Config) -> Pool:
        """Return the shared memory of a node: all of these are processes of their own elsewhere."""
        return self._pools.setdefault("%s-%d" % (node.role, node.rank), Pool())

    def _start(self, name: str, loop: Loop) -> None:
        def body() -> None:
            self.codes[name] = loop.run().code

        thread = threading.Thread(target=body, name=name, daemon=True)
        self._loops[thread] = loop
        self._threads.append(thread)
        thread.start()


def run_job(
    script: Callable[[KVStore], Any],
    workers: int = 2,
    servers: int = 2,
    *,
    type_name: str = "dist_sync",
    staleness: int | None = None,
    over: str = "inproc",
    **settings: Any,
) -> list[Any]:
    """Run `script(kv)` in every worker of a job of its own; return what each returned, by rank."""
    with Cluster(workers, servers, over=over, **settings) as job:
        return job.run(script, type_name, staleness)


def host_of(role: str, rank: int) -> str:
    """Return where a node is of a job whose values go over relays: two workers and every other server are `here`."""
    is_here = rank < 2 if role == "worker" else rank % 2 == 0
    return "here" if is_here else "there"


def shards_of(kv: Any, key: Any) -> tuple[Any, ...]:
    """Return the shards of a key, as this worker knows them."""
    return kv._backend._transfers.shards[key]


def rounds_of(kv: Any) -> dict[Any, int]:
    """Return the round of this worker's last push of each key."""
    transfers = kv._backend._transfers
    return {key: transfers.round_of(key) for key in transfers.shards}
