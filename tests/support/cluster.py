"""A whole job in threads of one process: scheduler, servers and workers over real sockets or in-process queues."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from distrun_runtime.ps.config import Config
from distrun_runtime.ps.counters import Counters
from distrun_runtime.ps.executor import Executor
from distrun_runtime.ps.postoffice import Postoffice
from distrun_runtime.ps.profile import Recorder
from distrun_runtime.ps.scheduler import Scheduler
from distrun_runtime.ps.serve import bind, wrapped
from distrun_runtime.ps.server import Server
from distrun_runtime.ps.session import Session
from distrun_runtime.ps.trace import Trace
from distrun_runtime.store.dist import DistStore
from distrun_runtime.transport.inproc import InprocNetwork
from distrun_runtime.transport.zeromq import Heartbeat, ZmqTransport

DEADLINE_S = 100.0
"""Beyond every deadline that a test sets, and below that of the test itself, also on a slow machine."""

END_S = 20.0
"""How long scheduler and servers have to end by themselves when the workers have."""


def config(role: str, **changes: Any) -> Config:
    """Return a node's configuration on this machine; `changes` replace fields."""
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
        token=b"a secret of this job",
        incarnation=0,
        heartbeat=Heartbeat(0.5, 30.0),
        start_timeout_s=60.0,
        op_timeout_s=60.0,
        bigarray_bound=1000000,
        verbose=0,
    )
    return replace(usual, **changes)


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
        **changes: Any,
    ) -> None:
        self.network = network or InprocNetwork()
        self._over = over
        self._changes = {"workers": workers, "servers": servers, **changes}
        self._threads: list[threading.Thread] = []
        self.codes: dict[str, int] = {}
        root = self._transport(config("scheduler", **self._changes))
        endpoint = bind(root, config("scheduler", **self._changes))
        self.root_port = int(endpoint.rpartition(":")[2])
        self.scheduler = Scheduler(config("scheduler", **self._changes), endpoint)
        self._start("scheduler", root, self.scheduler, None)
        self.counters = [Counters() for _ in range(servers)]
        self.recorders = [Recorder() for _ in range(servers)]
        shared = zip(self.counters, self.recorders, strict=True)
        self.executors = [Executor(counters, recorder, imports) for counters, recorder in shared]
        self.transports: dict[str, Any] = {"scheduler": root}
        for rank in range(servers):
            node = config("server", rank=rank, root_port=self.root_port, **self._changes)
            transport = self._transport(node)
            self.transports["server-%d" % rank] = transport
            server = Server(node, bind(transport, node), self.counters[rank], self.recorders[rank])
            self._start("server-%d" % rank, transport, server, self.executors[rank])

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()

    def session(self, rank: int = -1, **changes: Any) -> Session:
        """Return a worker's session, not opened yet."""
        node = config("worker", **{**self._changes, "rank": rank, "root_port": self.root_port, **changes})
        return Session(node, self._transport(node))

    def run(
        self, script: Callable[[DistStore], Any], type_name: str = "dist_sync", staleness: int | None = None
    ) -> list[Any]:
        """Run `script(kv)` in every worker; return what each returned, by rank. The first error is raised."""

        def work(session: Session) -> Any:
            return script(DistStore(type_name, session, staleness))

        return self.run_sessions(work)

    def run_sessions(self, script: Callable[[Session], Any]) -> list[Any]:
        """Run `script(session)` in every worker, the session open; return what each returned, by rank."""
        workers = self._changes["workers"]
        results: list[Any] = [None] * workers
        errors: list[BaseException] = []

        def body(rank: int) -> None:
            session = self.session(rank)
            try:
                session.open()
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
        for thread, office in self._offices.items():
            if thread.is_alive():
                office.tell(15)
                thread.join(DEADLINE_S)
        assert not any(thread.is_alive() for thread in self._threads)

    def _transport(self, node: Config) -> Any:
        over_zmq = self._over == "zmq"
        return wrapped(ZmqTransport(node.heartbeat, node.token) if over_zmq else self.network.transport(), node)

    def _start(self, name: str, transport: Any, node: Any, executor: Executor | None) -> None:
        trace = Trace(0, lambda: node.me)
        office = Postoffice(transport, node, self._changes.get("token", config("x").token), trace, executor=executor)

        def body() -> None:
            self.codes[name] = office.run().code

        thread = threading.Thread(target=body, name=name, daemon=True)
        self._offices = getattr(self, "_offices", {})
        self._offices[thread] = office
        self._threads.append(thread)
        thread.start()
