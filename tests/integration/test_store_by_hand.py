"""Real scheduler, server and worker processes, started by hand with the DMLC_* variables."""

from __future__ import annotations

import ast
import os
import re
import socket
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from manual import ManualJob
from slowness import scaled

from distrun_runtime.contract import address

ROOT = Path(__file__).resolve().parents[2]

TRAIN = """
    import numpy as np
    from distrun_runtime import kvstore

    kv = kvstore.create("dist_sync")
    kv.init("w", np.zeros((1200, 1200), "float32"))
    out = np.zeros((1200, 1200), "float32")
    for step in range(3):
        kv.push("w", np.full((1200, 1200), kv.rank + 1, "float32"))
        kv.pull("w", out)
    assert (out == sum(range(1, kv.num_workers + 1))).all()
    print("rank", kv.rank, "of", kv.num_workers, "done", flush=True)
"""

HOLD = """
    import sys, time
    import numpy as np
    from distrun_runtime import kvstore

    kv = kvstore.create("dist_sync")
    kv.init("w", np.zeros(4, "float32"))
    print("ready with rank=%d" % kv.rank, flush=True)
    if kv.rank == 0:
        try:  # a busy machine may come to the push only when somebody is lost already
            kv.push("w", np.ones(4, "float32"))
            kv.pull("w", np.zeros(4, "float32"))
        except Exception as err:
            print("%s at %.1f s: %s" % (type(err).__name__, time.monotonic(), err), flush=True)
            raise
    else:
        time.sleep(60)
"""


@pytest.mark.parametrize("begin", ["__main__.main(['server', 'no'])", "kvstore.create('dist_sync')"])
def test_a_node_opens_the_standard_streams_that_the_shell_closed_before_any_socket(begin: str) -> None:
    code = (
        "import contextlib, os, sys\nfrom distrun_runtime import __main__, kvstore\n"
        f"with contextlib.suppress(Exception): {begin}\n"
        "sys.exit(not all(os.path.samestat(os.fstat(number), os.stat(os.devnull)) for number in range(3)))"
    )
    argv = [sys.executable, "-c", code]
    ended = subprocess.run(argv, preexec_fn=lambda: os.closerange(0, 3), check=False)
    assert ended.returncode == 0


def test_five_variables_and_any_order_of_starting_do() -> None:
    with ManualJob() as job:
        script = job.script(TRAIN)
        for role in ("worker", "worker", "server", "server", "scheduler"):  # others are started by `start_all`
            job.start(role, *([script] if role == "worker" else []))
        assert set(job.wait()) == {0}, job.report()
        ranks = sorted(re.findall(r"rank (\d) of 2 done", job.out("worker-0") + job.out("worker-1")))
        assert ranks == ["0", "1"]
        assert "runs open" in job.err("scheduler-0")


def test_the_scheduler_binds_exactly_its_port_or_says_who_has_it() -> None:
    with ManualJob(1, 1) as job, socket.socket() as holder:
        holder.bind(("127.0.0.1", job.port))
        holder.listen()
        job.start("scheduler")
        assert job.wait("scheduler-0") == [1]
        assert "DMLC_PS_ROOT_PORT=%d" % job.port in job.err("scheduler-0")
        assert "in use" in job.err("scheduler-0")
        assert "Traceback" not in job.err("scheduler-0")


def test_ranks_that_are_given_are_kept() -> None:
    with ManualJob() as job:
        script = job.script(TRAIN)
        job.start("scheduler")
        for rank in (1, 0):
            job.start("server", DMLC_SERVER_ID=str(rank))
            job.start("worker", script, DMLC_WORKER_ID=str(rank))
        assert set(job.wait()) == {0}, job.report()
        assert "rank 1 of 2" in job.out("worker-0")
        assert "rank 0 of 2" in job.out("worker-1")


def test_the_interface_is_resolved_by_the_runtime_itself() -> None:
    with ManualJob(1, 1, DMLC_INTERFACE="lo", PS_VERBOSE="1") as job:
        job.start_all(job.script(TRAIN), 1, 1)
        assert set(job.wait()) == {0}, job.report()
        assert "event=bound endpoint=tcp://127.0.0.1:" in job.err("server-0")


def test_an_unknown_interface_is_an_error_that_lists_those_there_are() -> None:
    with ManualJob(1, 1, DMLC_INTERFACE="nope0") as job:
        job.start("server")
        assert job.wait("server-0") == [2]
        assert "nope0" in job.err("server-0")
        assert "lo" in job.err("server-0")
        assert "Traceback" not in job.err("server-0")


def test_a_store_without_a_job_says_how_to_start_one() -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("DMLC_", "DISTRUN_"))}
    code = "from distrun_runtime import kvstore; kvstore.create('dist_sync')"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "distrun launch" in done.stderr


def test_verbose_one_prints_addresses_and_verbose_two_every_message() -> None:
    with ManualJob(1, 1, PS_VERBOSE="2") as job:
        job.start_all(job.script(TRAIN), 1, 1)
        assert set(job.wait()) == {0}, job.report()
        lines = job.err("worker-0").splitlines()
        assert any(
            re.search(r"role=worker rank=0 .*event=roster node=server-0 .*endpoint=tcp://", line) for line in lines
        )
        assert any("event=send to=server-0 kind=push" in line for line in lines)
        server = job.err("server-0").splitlines()
        assert any("role=server rank=0" in line and "event=receive" in line and "kind=push" in line for line in server)
        assert all(line.startswith("distrun role=") for line in [*lines, *server])


def test_waiting_is_said_every_few_seconds_with_names() -> None:
    with ManualJob(2, 1) as job:
        job.start("scheduler")
        job.start("server")
        job.start("worker", job.script(TRAIN), DISTRUN_HOST="d1", DMLC_WORKER_ID="0")
        job.until("scheduler-0", "waiting for 1 of 2 workers: have worker-0@d1")


def test_a_worker_that_is_killed_is_named_to_the_others_at_once() -> None:
    """Nobody waits for a heartbeat that does not come: that would take 600 s here."""
    with ManualJob(PS_HEARTBEAT_TIMEOUT="600") as job:
        job.start_all(job.script(HOLD))
        victim, other = (1, 0) if _waits_for_all(job) == 0 else (0, 1)
        job.processes["worker-%d" % victim].kill()
        assert job.wait("worker-%d" % other) == [1]
        assert "worker-1@" in job.out("worker-%d" % other)
        # Nothing stays: the servers and the scheduler end by themselves, and say that it did not end well.
        assert job.wait("scheduler-0") == [1], job.report()
        job.wait("server-0", "server-1")


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_worker_that_holds_the_gil_for_fifteen_seconds_is_alive() -> None:
    with ManualJob() as job:
        script = job.script(
            """
            import ctypes
            import numpy as np
            from distrun_runtime import kvstore

            kv = kvstore.create("dist_sync")
            kv.init("w", np.zeros(4, "float32"))
            if kv.rank == 1:
                ctypes.PyDLL(None).sleep(15)  # PyDLL keeps the GIL during the call
            kv.push("w", np.ones(4, "float32"))
            out = np.zeros(4, "float32")
            kv.pull("w", out)
            assert (out == 2).all()
            """
        )
        job.start_all(script)
        assert set(job.wait()) == {0}, job.report()


def test_a_server_that_is_killed_ends_the_workers_with_its_name() -> None:
    with ManualJob() as job:
        job.start_all(job.script(HOLD))
        blocked = _waits_for_all(job)
        job.processes["server-1"].kill()
        assert job.wait("worker-%d" % blocked) == [1]
        assert re.search(r"PeerLost.*server-[01]@", job.out("worker-%d" % blocked))


def test_a_scheduler_that_is_killed_ends_servers_and_workers() -> None:
    with ManualJob() as job:
        job.start_all(job.script(HOLD))
        blocked = _waits_for_all(job)
        job.processes["scheduler-0"].kill()
        assert job.wait("worker-%d" % blocked, "server-0", "server-1") == [1, 1, 1]
        # The servers end at once, too, and the worker may hear of that first.
        assert re.search(r"PeerLost.*(the scheduler|server-[01]@).* is lost", job.out("worker-%d" % blocked))
        assert "the scheduler" in job.err("server-0")


def test_an_exception_ends_the_worker_at_once_and_reaches_the_others() -> None:
    with ManualJob() as job:
        script = job.script(
            """
            import numpy as np
            from distrun_runtime import kvstore

            kv = kvstore.create("dist_sync")
            kv.init("w", np.zeros(4, "float32"))
            kv.push("w", np.ones(4, "float32"))
            if kv.rank == 1:
                raise ValueError("a bug of mine")
            kv.push("w", np.ones(4, "float32"))
            kv.pull("w", np.zeros(4, "float32"))
            """
        )
        job.start_all(script)
        assert job.wait("worker-0", "worker-1") == [1, 1]
        both = job.err("worker-0") + job.err("worker-1")
        assert re.search(r"PeerLost.*worker-1@.*ValueError: a bug of mine", both)
        job.wait()


def test_a_clean_end_flushes_what_was_pushed() -> None:
    with ManualJob() as job:
        script = job.script(
            """
            import numpy as np
            from distrun_runtime import kvstore

            kv = kvstore.create("dist_async")
            kv.init("w", np.zeros(1000000, "float32"))
            kv.set_optimizer("test", rescale_grad=1)
            kv.barrier()
            if kv.rank == 0:
                for _ in range(5):
                    kv.push("w", np.ones(1000000, "float32"))
                # Ends without close, barrier or pull.
            else:
                import time
                out = np.zeros(1000000, "float32")
                end = time.monotonic() + 30
                while out.min() < 5 and time.monotonic() < end:
                    kv.pull("w", out)
                assert (out == 5).all()
            """
        )
        job.start_all(script)
        assert set(job.wait()) == {0}, job.report()


def test_an_error_that_nobody_waited_for_makes_the_exit_code_one() -> None:
    with ManualJob(1, 1) as job:
        script = job.script(
            """
            import numpy as np
            from distrun_runtime import kvstore

            kv = kvstore.create("dist_async")
            kv.init("w", np.zeros(4, "float32"))
            kv.push("w", np.zeros(4, "float32"), wait=False)  # no rule: refused
            print("the script itself ends well", flush=True)
            """
        )
        job.start_all(script, 1, 1)
        assert job.wait("worker-0") == [1], job.report()
        assert "the script itself ends well" in job.out("worker-0")
        assert "set_optimizer" in job.err("worker-0")
        assert job.wait("scheduler-0", "server-0") == [1, 1], "the job did not end well"


def test_a_worker_says_that_it_waits_for_the_scheduler() -> None:
    with ManualJob(1, 1) as job:
        job.start("worker", job.script(TRAIN))
        job.until("worker-0", "waiting for the scheduler at tcp://127.0.0.1:%d" % job.port)


def test_a_scheduler_name_that_does_not_resolve_is_an_error_at_once() -> None:
    with ManualJob(1, 1, DMLC_PS_ROOT_URI="nohost.invalid") as job:
        job.start("server")
        assert job.wait("server-0") == [2]
        assert "nohost.invalid" in job.err("server-0")


def test_servers_that_are_terminated_together_say_nothing_of_a_death() -> None:
    with ManualJob(1, 2) as job:
        job.start("scheduler")
        job.start("server")
        job.start("server")
        job.start("worker", job.script(HOLD))
        job.until("worker-0", "ready")
        job.processes["worker-0"].kill()
        job.wait("worker-0")
        for name in ("scheduler-0", "server-0", "server-1"):
            job.processes[name].terminate()
        job.wait("scheduler-0", "server-0", "server-1")
        words = job.err("scheduler-0") + job.err("server-0") + job.err("server-1")
        assert "the scheduler at" not in words
        assert "server-0@" not in words


def test_a_forked_child_cannot_use_the_store_and_ends_quietly() -> None:
    with ManualJob(1, 1) as job:
        script = job.script(
            """
            import os, sys, warnings
            import numpy as np
            from distrun_runtime import kvstore
            from distrun_runtime.errors import StoreClosed

            warnings.simplefilter("ignore")
            kv = kvstore.create("dist_sync")
            kv.init("w", np.zeros(4, "float32"))
            child = os.fork()
            if child == 0:
                ones = np.ones(4, "float32")
                for call in (lambda: kv.push("w", ones), lambda: kvstore.create("dist_sync"), kv.barrier):
                    try:
                        call()
                    except StoreClosed:
                        continue
                    os._exit(3)
                sys.exit(0)  # runs the exit handlers
            assert os.waitpid(child, 0)[1] == 0
            kv.push("w", np.ones(4, "float32"))
            out = np.zeros(4, "float32")
            kv.pull("w", out)
            assert (out == 1).all()
            """
        )
        job.start_all(script, 1, 1)
        assert set(job.wait()) == {0}, job.report()


@pytest.mark.slow
def test_a_scheduler_that_nobody_joins_ends_at_its_deadline_with_what_it_saw() -> None:
    """All who came had another job in mind: here, three workers."""
    with ManualJob(2, 1, DISTRUN_START_TIMEOUT="8") as job:
        job.start("scheduler")
        job.start("server", DMLC_NUM_WORKER="3")
        assert job.wait("scheduler-0", "server-0") == [1, 1]
        for name in ("scheduler-0", "server-0"):
            assert "expects 3 workers and 1 server; the scheduler was started for 2 and 1" in job.err(name)
        words = job.err("scheduler-0")
        assert "registration ended after 8 s, waiting for 2 of 2 workers: have none; 1 of 1 servers: have none" in words
        assert "turned away: server@" in words


def test_servers_say_who_was_missing_when_registration_failed() -> None:
    with ManualJob(2, 1, DISTRUN_START_TIMEOUT="5") as job:
        job.start("scheduler")
        job.start("server")
        job.start("worker", job.script(TRAIN))
        assert job.wait() == [1, 1, 1], job.report()
        for name in ("scheduler-0", "server-0", "worker-0"):
            assert "registration ended after 5 s, waiting for 1 of 2 workers: have worker" in job.err(name)
        assert "is lost" not in job.err("server-0")


@pytest.mark.parametrize("root", ["192.0.2.77", "2001:db8::77"])
def test_a_scheduler_whose_address_is_not_this_hosts_says_where_it_listens(root: str) -> None:
    with ManualJob(1, 1, DMLC_PS_ROOT_URI=root, DMLC_NODE_HOST="127.0.0.1", PS_VERBOSE="1") as job:
        job.start("scheduler")
        job.until("scheduler-0", "event=listening")
        words = job.err("scheduler-0")
        assert "warning: DMLC_PS_ROOT_URI=%s is not an address of host " % root in words
        own = address.reachable(":" in root)
        assert "listens on port %d of all its addresses (%s)." % (job.port, ", ".join(own) or "unknown") in words
        assert "if not, fix: DMLC_PS_ROOT_URI=%s" % (own or ["ADDRESS"])[0] in words
        assert "event=listening endpoint=tcp://127.0.0.1:%d" % job.port in words
        assert root not in words.partition("event=listening")[2]
        if ":" not in root:
            script = job.script(TRAIN)
            for role in ("server", "worker"):
                job.start(role, *([script] if role == "worker" else []), DMLC_PS_ROOT_URI="127.0.0.1")
            assert set(job.wait()) == {0}, job.report()


@pytest.mark.parametrize("paths", ["segments", "none"])
def test_nodes_of_a_host_talk_by_unix_sockets_of_their_own_unless_that_is_switched_off(paths: str) -> None:
    with ManualJob(2, 1, PS_VERBOSE="1", DISTRUN_DATA_PATHS=paths) as job:
        script = job.script(
            """
            import time
            import numpy as np
            from distrun_runtime import kvstore

            kv = kvstore.create("dist_sync")
            kv.init("w", np.zeros(4, "float32"))
            for step in range(100):  # over the change of connections, whenever it comes
                out = np.empty(4, "float32")
                kv.pushpull("w", np.full(4, step, "float32"), out=out)
                assert (out == 2 * step).all(), out
                kv.barrier()
            """
        )
        job.start_all(script, workers=2, servers=1)
        assert set(job.wait()) == {0}, job.report()
        chosen = {
            link: f"event=path link={link} path=unix" in job.err("worker-0") for link in ("server-0", "scheduler")
        }
        assert set(chosen.values()) == {paths == "segments"}, job.report()


def test_garbage_on_a_port_of_the_job_harms_nobody() -> None:
    with ManualJob(1, 1, PS_VERBOSE="1") as job:
        script = job.script(
            """
            import os, sys, time
            import numpy as np
            from distrun_runtime import kvstore

            kv = kvstore.create("dist_sync")
            kv.init("w", np.zeros(4, "float32"))
            print("ready", flush=True)
            while not os.path.exists(sys.argv[1]):
                time.sleep(0.05)
            kv.push("w", np.ones(4, "float32"))
            kv.pull("w", np.zeros(4, "float32"))
            """
        )
        go = job.path("go")
        job.start("scheduler")
        job.start("server")
        job.start("worker", script, str(go))
        job.until("worker-0", "ready")
        server = int(re.search(r"event=bound endpoint=tcp://127.0.0.1:(\d+)", job.err("server-0")).group(1))
        for port in (job.port, server):
            for junk in (b"GET / HTTP/1.0\r\n\r\n", os.urandom(4096), b"\x00" * 100):
                with socket.create_connection(("127.0.0.1", port), timeout=scaled(60)) as line:
                    line.sendall(junk)
            _send_junk_messages(port)
        go.touch()
        assert set(job.wait()) == {0}, job.report()


def _send_junk_messages(port: int) -> None:
    import zmq

    context = zmq.Context()
    for junk in ([b"x"], [b"DRKV" + b"\xff" * 60, b""], [os.urandom(80), b"{}", b"p"], [b"", b""]):
        for password in (b"", b"open"):
            dealer = context.socket(zmq.DEALER)
            if password:
                dealer.plain_username = dealer.plain_password = password
            dealer.connect("tcp://127.0.0.1:%d" % port)
            dealer.send_multipart(junk)
            dealer.close(500 if password else 0)
    context.term()


def _waits_for_all(job: ManualJob) -> int:
    """Wait until both workers are ready; return the number of the process that has rank 0 and will block."""
    job.until("worker-0", "ready")
    job.until("worker-1", "ready")
    return 0 if "rank=0" in job.out("worker-0") else 1


@pytest.mark.parametrize("is_own", [True, False], ids=["environment", "system"])
def test_a_python_without_numpy_is_told_how_to_get_it_and_never_by_bare_pip(tmp_path: Path, is_own: bool) -> None:
    venv.create(tmp_path / "venv", with_pip=False)
    python = str(tmp_path / "venv" / "bin" / "python") if is_own else os.path.realpath(sys.executable)
    code = "import sys; sys.path.insert(0, %r); from distrun_runtime.__main__ import main; sys.exit(main(['server']))"
    done = subprocess.run(
        # -S: without the packages of the system.
        [python, "-I", *([] if is_own else ["-S"]), "-c", code % str(ROOT / "runtime")],
        env={name: value for name, value in os.environ.items() if not name.startswith("DMLC_")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    error, hint = done.stderr.splitlines()
    assert error.startswith("distrun: error: server: %s on this host has no " % python)
    way = "-m pip install" if is_own else "-m venv ~/venv && ~/venv/bin/pip install"
    assert hint.startswith("distrun: hint: %s %s numpy pyzmq" % (python, way))


@pytest.mark.parametrize("was_on", ["enable", "disable"])
def test_a_server_that_cannot_be_imported_leaves_garbage_collection_as_it_was(was_on: str) -> None:
    code = (
        f"import gc, sys; gc.{was_on}(); sys.modules['distrun_runtime.ps.node'] = None\n"
        "from distrun_runtime.__main__ import main; print(main(['server']), gc.isenabled())"
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith("DMLC_")}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == f"1 {was_on == 'enable'}\n"


PLACED = """
    import numpy as np
    from distrun_runtime import kvstore

    with kvstore.create("dist_sync") as kv:
        kv.init("w", np.zeros(100, "float32"))
        print("pieces", sorted(each["pieces"] for each in kv.stats()))
"""
BOUND = {"MXNET_KVSTORE_BIGARRAY_BOUND": "10"}


@pytest.mark.parametrize(
    ("everywhere", "worker", "pieces", "warned"),
    [
        ({}, {}, [0, 1], ""),
        (BOUND, {}, [1, 1], ""),
        ({**BOUND, "DISTRUN_PARTITION": "size"}, {}, [0, 1], "scheduler-0"),
        ({}, BOUND, [0, 1], "worker-0"),
    ],
)
def test_mxnets_bound_selects_its_placement_or_a_warning_says_why_not(
    everywhere: dict[str, str], worker: dict[str, str], pieces: list[int], warned: str
) -> None:
    """It did nothing unless DISTRUN_PARTITION was set, too."""
    with ManualJob(1, 2, **everywhere) as job:
        script = job.script(PLACED)
        for role in ("scheduler", "server", "server"):
            job.start(role)
        job.start("worker", script, **worker)
        assert set(job.wait()) == {0}, job.report()
        assert f"pieces {pieces}" in job.out("worker-0"), job.report()
        found = {name for name in ("scheduler-0", "worker-0") if "MXNET_KVSTORE_BIGARRAY_BOUND" in job.err(name)}
        assert found == ({warned} if warned else set()), job.report()


MANY = """
    import os, sys
    import numpy as np
    from distrun_runtime import kvstore

    def used(pid):  # MiB of memory, mappings and files
        with open("/proc/%s/status" % pid) as status:
            memory = next(int(line.split()[1]) >> 10 for line in status if line.startswith("VmRSS:"))
        with open("/proc/%s/maps" % pid) as maps:
            return memory, len(maps.readlines()), len(os.listdir("/proc/%s/fd" % pid))

    processes = [os.getpid(), *sys.argv[1:]]
    values = [np.ones((4, 100_000), np.float32)] * 2
    for number in range(160):
        with kvstore.create("dist_sync") as kv:
            kv.init(["a", "b"], values)
            kv.set_optimizer("sgd", learning_rate=0.1, momentum=0.9)
            kv.pushpull(["a", "b"], values, out=[np.empty_like(value) for value in values])
            with kv.view(["a", "b"]):
                pass
        if number in (40, 159) and kv.rank == 0:
            print("used", [used(pid) for pid in processes], flush=True)
"""


@pytest.mark.slow
def test_servers_and_workers_stay_as_large_as_they_are_while_160_stores_are_made_and_closed() -> None:
    """A store of 1.6 MB left as much in the server, and again in each worker, until the job ended."""
    with ManualJob(2, 1) as job:
        script = job.script(MANY)
        for role in ("scheduler", "server"):
            job.start(role)
        pids = [str(job.processes[name].pid) for name in ("scheduler-0", "server-0")]
        for _ in range(2):
            job.start("worker", script, *pids)
        assert set(job.wait()) == {0}, job.report()
        lines = re.findall(r"used (.*)", job.out("worker-0") + job.out("worker-1"))
        before, after = map(ast.literal_eval, lines)
        for one, other in zip(before, after, strict=True):
            # 119 stores of 3 MB; mappings and files come and go by a few.
            assert other[0] - one[0] < 60, (before, after)
            assert other[1] - one[1] < 30, (before, after)
            assert other[2] - one[2] < 10, (before, after)
