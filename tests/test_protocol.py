"""`docs/protocol.md` and the code say the same: golden bytes, tables of codes and members."""

from __future__ import annotations

import ast
import hashlib
import hmac
import inspect
import itertools
import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from measured import MeasuredJob
from sample_plan import sample_plan

from distrun import backends, planning
from distrun.hosts import parse
from distrun.request import JobRequest, Setting
from distrun_runtime import reporting
from distrun_runtime.agent.agent import Agent
from distrun_runtime.arrays.dtypes import name_of
from distrun_runtime.contract import agent_messages, control, enrolment, session
from distrun_runtime.contract import plan as plans
from distrun_runtime.contract.control import Chunk
from distrun_runtime.contract.dataclass import read
from distrun_runtime.contract.plan import Host, Place, Plan, Resources, Runtime, Secrets, Sync, Task
from distrun_runtime.coordinator import logs, messages
from distrun_runtime.coordinator.jobstore import JobStore
from distrun_runtime.coordinator.listener import Register
from distrun_runtime.coordinator.logs import IndexEntry as Record
from distrun_runtime.coordinator.messages import KeepRule
from distrun_runtime.errors import WireError
from distrun_runtime.ops import reduce
from distrun_runtime.ops.compression import CODECS, ROWS
from distrun_runtime.protocol import message
from distrun_runtime.protocol.handshake import Acceptor, NodeIdentity, Opener
from distrun_runtime.protocol.message import DTYPES, Entry, Kind, Message, Payload, entries_of, payloads_of, rows_of
from distrun_runtime.ps.replies import refusal
from distrun_runtime.transport import direct, host_paths
from distrun_runtime.transport.admission import credentials
from distrun_runtime.transport.base import Heartbeat
from distrun_runtime.transport.zeromq import ZmqTransport

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "protocol.md").read_text("utf-8")
GOLDEN = dict(re.findall(r"^<!-- golden (\w+) -->\n```\w+\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))

WORKER = NodeIdentity("calm-otter-7f3", "worker", 1, 0, "d2", 4711, "tcp://10.0.0.2:40001", 2, 1)
SERVER = NodeIdentity("calm-otter-7f3", "server", 0, 0, "d1", 4242, "tcp://10.0.0.1:40000", 2, 1)
TOKEN = b"2b7e151628aed2a6abf7158809cf4f3c"
OPENER, ACCEPTOR = "0f" * 16, "f0" * 16
PLAN = Plan(
    job="calm-otter-7f3",
    name="digits",
    backend="local",
    command=("python", "train.py"),
    cwd="/srv/code",
    hosts=(Host("d1", "127.0.0.1", ("master",), {"user": "ann"}, "eth1", "ssh -l ann d1", "0,2", "hosts:1"),),
    tasks=(
        Task(
            "worker-0",
            "worker",
            0,
            "d1",
            ("python", "train.py"),
            "/srv/code",
            {"DMLC_ROLE": "worker"},
            {"DMLC_PS_ROOT_PORT": "{scheduler.port}", "MASTER_PORT": "{7/port:master}"},
            ("API_KEY",),
            ("numpy",),
            "7",
            (0, 1),
        ),
    ),
    gpus_per_worker=1,
    forward_signals=("USR1",),
    unset=("DMLC_ROLE", "SLURM_*"),
    runtime=Runtime(digest="9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"),
    activate=". /srv/venv/bin/activate",
    program="python",
    script="train.py",
    imports={"torch": "train.py:3"},
    sync=Sync(
        "/srv/code",
        123456,
        12,
        identity="2049:131 5d1c0a3e-7f0b-4c53-9c77-0a5b8d6f2e11",
        brings=False,
        activated=("/srv/venv",),
        lacks={"bin/own": True},
    ),
    joined=("LD_LIBRARY_PATH",),
    doctor="distrun doctor -H hosts",
    nonce="8c5e1f0a93b7d246",
    places=(Place("7", "d1", Resources(8, 68719476736, ("0", "1"))),),
)


def parts(name: str) -> list[str]:
    return [part.strip() for part in GOLDEN[name].split("--\n")]


def section(title: str) -> str:
    """The text below a heading, up to the next one."""
    return re.split(r"^#+ ", PAGE.split("# %s\n" % title, 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


def rows(title: str) -> list[list[str]]:
    """The cells of the table rows below a heading, heads left out."""
    lines = [line.strip("|").split("|") for line in section(title).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line] for line in lines if not set(line[0]) <= {"-", " "}][1:]


def test_every_golden_block_is_compared() -> None:
    """One that is added needs a test here."""
    named = set(re.findall(r"GOLDEN\[\"(\w+)\"\]|(?:parts|body|check)\(\"(\w+)\"", Path(__file__).read_text("utf-8")))
    assert {one or other for one, other in named} == set(GOLDEN)
    assert PAGE.count("<!-- golden") == len(GOLDEN)


def check(name: str, sent: Message) -> Message:
    """Check that a message is the golden one, and that the golden one is read as this message; return what is read."""
    golden = [bytes.fromhex(part) for part in parts(name)]
    assert [bytes(frame) for frame in message.encode(sent)] == golden
    heard = message.decode(golden)
    assert rows_of(heard.entries) == rows_of(sent.entries)
    assert [bytes(each) for each in heard.payloads] == [bytes(each) for each in sent.payloads]
    fields = (
        "kind",
        "is_reply",
        "is_error",
        "is_relayed",
        "store",
        "role",
        "rank",
        "priority",
        "request",
        "bucket",
        "step",
        "body",
    )
    assert [getattr(heard, field) for field in fields] == [getattr(sent, field) for field in fields]
    return heard


def push(request: int, entries: Sequence[Entry], **more: Any) -> Message:
    return Message(Kind.PUSH, store=1, role=3, rank=1, request=request, entries=entries_of(entries), **more)


def test_golden_push() -> None:
    entries = [Entry(4, 1000, 2, 57, 0, 0, Payload.FRAME), Entry(5, 0, 1, 57, 1, 0, Payload.FRAME)]
    values = [np.array([1, 2], "<f4").tobytes(), np.array([1], "<f8").tobytes()]
    check("push", push(7, entries, priority=-2, payloads=values))


def test_golden_bulk() -> None:
    """A message with a frame in shared memory: the head and one reference."""
    head = host_paths._HEAD.pack(host_paths.MAGIC, host_paths.VERSION, host_paths.BulkKind.CARRIED, 1, 7, 9)
    assert bytes.fromhex("".join(parts("bulk"))) == head + host_paths._REFERENCE.pack(2, 3, 4096, 65536)


def test_golden_direct() -> None:
    """The proofs on a direct connection, and the mark."""
    inner = ZmqTransport(Heartbeat())
    made = direct.DirectTransport(inner, TOKEN)
    mark = direct._HEAD.pack(direct.MAGIC, direct.VERSION, direct.DirectKind.MARK)
    assert [bytes.fromhex(each) for each in parts("direct")] == [*made._proofs(bytes.fromhex(OPENER)), mark]
    made.close()


def test_golden_direct_table() -> None:
    """What goes before a message on a direct connection."""
    assert bytes.fromhex("".join(parts("direct_table"))) == direct._TABLES[3].pack(3, 48, 0, 4)


def test_golden_push_that_registers_a_bucket_and_the_next_one_of_it() -> None:
    entries = [Entry(4, 0, 1, 57, 0, 0, Payload.PACKED), Entry(5, 0, 2, 57, 0, 0, Payload.PACKED)]
    heard = check("push_bucket", push(11, entries, bucket=3, payloads=[np.array([1, 2, 3], "<f4").tobytes()]))
    values = [np.frombuffer(each or b"", "<f4").tolist() for each in payloads_of(heard.entries, heard.payloads)]
    assert values == [[1], [2, 3]]
    check("push_step", push(12, [], bucket=3, step=1, payloads=[np.array([4, 5, 6], "<f4").tobytes()]))


def test_golden_refusal_of_a_push_that_is_to_be_sent_again() -> None:
    sent = refusal(push(12, [], bucket=3, step=1), "bucket 3 is not known to server-0", again=True)
    check("push_again", replace(sent, role=2, rank=0))


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        ([12], [[1], [2, 3]]),
        ([4, 8], [[1], [2, 3]]),
        ([8, 4], "a frame ends within a packed entry"),
        ([4, 4], "2 packed entries announce 12 bytes, their frames have 8"),
        ([], "announce 12 bytes, their frames have 0"),
    ],
)
def test_a_frame_holds_whole_packed_entries(frames: list[int], expected: Any) -> None:
    entries = [Entry(4, 0, 1, 57, payload=Payload.PACKED), Entry(5, 0, 2, 57, payload=Payload.PACKED)]
    edges = np.cumsum([0, *frames]).tolist()
    data = np.array([1, 2, 3], "<f4").tobytes()
    payloads = [data[one:other] for one, other in itertools.pairwise(edges)]
    sent = [bytes(frame) for frame in message.encode(push(1, entries, payloads=payloads))]
    if isinstance(expected, str):
        with pytest.raises(WireError, match=expected):
            message.decode(sent)
        return
    heard = message.decode(sent)
    found = [np.frombuffer(each or b"", "<f4").tolist() for each in payloads_of(heard.entries, heard.payloads)]
    assert found == expected


@pytest.mark.parametrize(
    "wrong", [Entry(5, 0, 2, 57), Entry(5, 0, 2, 57, codec=3, payload=Payload.PACKED), Entry(5, 0, 2, 57, payload=1)]
)
def test_packed_entries_share_no_message_with_others(wrong: Entry) -> None:
    sent = push(1, [Entry(4, 0, 1, 57, payload=Payload.PACKED), wrong], payloads=[bytes(4), bytes(8)])
    with pytest.raises(WireError, match="entries of another kind"):
        message.decode([bytes(frame) for frame in message.encode(sent)])


def test_golden_compressed_push() -> None:
    codec = CODECS["2bit"]
    values = np.array([0.6, -0.7, 0.1, 0.5, -0.5], np.float32)
    entries = [Entry(4, 0, 5, 58, 0, codec.number, Payload.FRAME)]
    payloads = [codec.encode(values, None, codec.check({}))]
    heard = check("push_2bit", push(8, entries, body={"codec": {"threshold": 0.5}}, payloads=payloads))
    assert codec.decode(heard.payloads[0], 5, codec.check({})).tolist() == [0.5, -0.5, 0, 0.5, -0.5]


def test_golden_push_of_rows() -> None:
    values = np.array([[1, 2], [3, 4]], np.float32)
    entries = [Entry(6, 8, 8, 58, 0, ROWS, Payload.FRAME)]
    heard = check("push_rows", push(9, entries, payloads=[reduce.encode(np.array([0, 3]), values)]))
    found, given = reduce.decode(heard.payloads[0], 4, 2, np.dtype(np.float32))
    assert (found.tolist(), given.tolist()) == ([0, 3], values.tolist())


def test_golden_push_that_skips_a_round() -> None:
    check("push_skip", push(10, [Entry(4, 0, 5, 59, 0, 0, Payload.NONE)], body={"skip": {"skip": True}}))


def body(name: str) -> bytes:
    return GOLDEN[name].replace("\n", "").encode()


def test_golden_password() -> None:
    user, password = credentials(TOKEN)
    assert parts("password") == ["%s %s" % (user.decode(), password.decode())]


def test_golden_hello() -> None:
    head, text = (bytes(frame) for frame in message.encode(Opener(WORKER, TOKEN, OPENER).hello()))
    golden_head, golden_body = parts("hello")
    assert head == bytes.fromhex(golden_head)
    assert text == golden_body.replace("\n", "").encode()


def test_golden_challenge_and_proof() -> None:
    opener, acceptor = Opener(WORKER, TOKEN, OPENER), Acceptor(SERVER, TOKEN, ACCEPTOR)
    challenge = acceptor.challenge(opener.hello())
    proof = opener.answer(challenge)
    assert bytes(message.encode(challenge)[1]) == body("challenge")
    assert bytes(message.encode(proof)[1]) == body("proof")
    signed = hmac.new(TOKEN, body("transcript"), "sha256").hexdigest()
    assert challenge.body["proof"] == signed, "anybody can compute it from the page"


@pytest.mark.parametrize(
    ("golden", "header", "raw"),
    [
        (GOLDEN["ping"], {"type": "ping", "n": 3}, b""),
        (
            GOLDEN["output"],
            {"type": "output", "task": "worker-0", "attempt": 0, "stream": "out", "offset": 0, "seq": 5},
            b"hello\n",
        ),
        (GOLDEN["sample"], dict(messages.to_frame(messages.Sample("d1", 2.0)).header, seq=4), b""),
        (GOLDEN["received"], {"type": "received", "seq": 7}, b""),
        (GOLDEN["credit"], {"type": "credit", "bytes": 2097152}, b""),
        (GOLDEN["resume"], {"type": "resume", "received": 7, "credit": 2097152}, b""),
        (
            GOLDEN["chunk"],
            {"type": "runtime", "digest": "ab", "chunk": 131072, "last": True, "seq": 9},
            b"PK",
        ),
        (
            GOLDEN["copy"],
            {**messages.copy("5d1c0a3e", [KeepRule(r".*/[^/]*\.ckpt", False, True)]).header, "seq": 3},
            b"",
        ),
        (GOLDEN["files"], {**messages.files("5d1c0a3e", b"").header, "chunk": 131072, "last": True, "seq": 9}, b"ab"),
        (GOLDEN["folder"], {"type": "folder", "state": "mine", "notes": [], "seq": 4}, b""),
        (
            GOLDEN["copy_failed"],
            {"type": "copy_failed", "reason": "no room", "kind": "disk", "fix": "make room there", "seq": 5},
            b"",
        ),
        (GOLDEN["said"], {"type": "said", "text": "2 hosts are up", "level": "info"}, b""),
        (
            GOLDEN["place"],
            {"type": "output", "task": "worker-0", "host": "h1", "stream": "out", "at": 4096, "length": 512},
            b"",
        ),
        (GOLDEN["signal"], {"type": "signal", "name": "INT"}, b""),
        (GOLDEN["ask_state"], {"type": "state"}, b""),
        (GOLDEN["ask_stop"], {"type": "stop", "signal": "TERM"}, b""),
        (GOLDEN["ask_kill"], {"type": "kill"}, b""),
        (GOLDEN["subscribe"], {"type": "subscribe", "events": True, "output": {"cursor": 0}}, b""),
        (GOLDEN["look"], {"type": "subscribe", "metrics": True, "look": ["d1"]}, b""),
    ],
)
def test_golden_frames(golden: str, header: dict[str, Any], raw: bytes) -> None:
    length, _, text = golden.strip().partition(" ")
    expected = bytes.fromhex(length) + text.replace("\\n", "\n").encode()
    assert session.encode(header, raw) == expected
    [frame] = session.Decoder().feed(expected)
    assert frame.header == (dict(header, size=len(raw)) if raw else header)
    assert frame.body == raw


def test_golden_samples() -> None:
    """JSON as Python writes and reads it: numbers that are none have a word each."""
    said = {"step": 7, "total": None, "values": {"loss": float("nan")}, "time": 1790000000.25}
    header = {
        "type": "metrics",
        "clock": 12.5,
        "time": 1790000000.5,
        "host": {"cores": 2, "cpu_s": 80.25},
        "tasks": {"worker-0": {"cpu_s": 3.5, "rss": 4096, "report": said}},
    }
    length, _, text = GOLDEN["measured"].strip().partition(" ")
    expected = bytes.fromhex(length) + text.encode()
    assert session.encode(header) == expected
    [frame] = session.Decoder().feed(expected)
    heard = messages.to_event("d1", frame, 1.0)
    assert isinstance(heard, agent_messages.Measured)
    assert set(heard.value) == set(header) - {"type"}
    assert math.isnan(heard.value["tasks"]["worker-0"]["report"]["values"]["loss"])


def test_golden_index() -> None:
    written = [
        Record(1790000000.25, "worker-1", "out", 0, 4096, 12, 70000),
        Record(1790000000.5, "scheduler", "err", 0, 0, 80, 70012),
    ]
    golden = bytes.fromhex(GOLDEN["index"])
    assert b"".join(map(logs.encode, written)) == golden
    assert list(logs.entries(golden)) == written


SNAPSHOT = {
    "schema": control.METRICS_SCHEMA,
    "time": 1790000000.5,
    "progress": {"step": 7, "loss": "nan"},
    "hosts": {},
    "tasks": {"worker-0": {"cpu": 1.5, "condition": "waiting"}},
    "store": None,
    "history": {"cpu": [1.5]},
}
EVENT = {"event": "state", "state": "running", "time": "2026-01-31T12:00:00.000Z", "version": 1}


@pytest.mark.parametrize(
    ("golden", "made"),
    [
        (GOLDEN["hello_client"], control.client_hello()),
        (GOLDEN["hello_coordinator"], control.encode(control.CoordinatorHello("calm-otter-7f3", 4711, "d1"))),
        (GOLDEN["told_state"], control.encode(control.JobState({"id": "calm-otter-7f3", "state": "running"}, 3))),
        (GOLDEN["event"], control.encode(control.JobEvent(EVENT))),
        (GOLDEN["told_output"], control.encode(Chunk("worker-0", "d1", "out", 0, 6, b"hello\n", 6))),
        (GOLDEN["gap"], control.encode(control.OutputGap(512, 4096))),
        (GOLDEN["output_end"], control.encode(control.OutputEnd(4096))),
        (GOLDEN["told_metrics"], control.encode(control.JobNumbers(SNAPSHOT))),
        (GOLDEN["detached"], control.encode(control.LauncherReleased(4096))),
        (
            GOLDEN["refused"],
            control.encode(
                control.RequestRefused("the job has 64 clients already", "end one of them, such as a distrun attach")
            ),
        ),
        (GOLDEN["said"], control.encode(control.Said("2 hosts are up", "info"))),
        (
            GOLDEN["said_sync"],
            control.encode(control.Said("sync 1/2: 3 files", "info", control.CopyProgress(1, 2, "3 files"))),
        ),
        (GOLDEN["place"], control.encode(Chunk("worker-0", "h1", "out", 4096, 512))),
    ],
)
def test_golden_frames_of_the_control_socket(golden: str, made: bytes) -> None:
    length, _, text = golden.strip().partition(" ")
    assert made == bytes.fromhex(length) + text.replace("\\n", "\n").encode()


def test_output_that_is_in_no_log_has_no_place_there() -> None:
    said = Chunk("worker-0", "d1", "out", None, 3, b"abc")
    (frame,) = session.Decoder().feed(control.encode(said))
    assert "at" not in frame.header
    assert read(Chunk, frame.header, frame.body) == said


def test_the_page_lists_every_member_of_a_snapshot() -> None:
    job = MeasuredJob(sample_plan(1, 1, ("d1",)))
    job.report("worker-0", 5, 10, loss=0.5)
    job.more["server-0"]["counters"] = {"role": "server", "values": {"pushes": 1}, "lags": {"0": [1, 2, 3, 4]}}
    job.more["scheduler"]["counters"] = {"role": "scheduler", "values": {"members": 3}}
    snapshot = job.run_to(20).snapshot()
    page = {row[0].strip("`"): set(re.findall(r"`(\w+)`", row[1])) for row in rows("Metrics")}
    assert set(page) == set(snapshot)
    server, scheduler = snapshot["store"].pop("servers")["server-0"], snapshot["store"].pop("scheduler")
    found = {
        "progress": set(snapshot["progress"]),
        "hosts": set(snapshot["hosts"]["d1"]),
        "tasks": set(snapshot["tasks"]["worker-0"]) | {*snapshot["tasks"]["worker-0"]["report"]},
        "store": {*server, *scheduler, *snapshot["store"]},
        "history": set(snapshot["history"]),
    }
    for name, names in found.items():
        assert names <= page[name], name


def test_every_type_that_a_client_may_send_has_its_row() -> None:
    named = {name for row in rows("Client to coordinator") for name in re.findall(r"`(\w+)`", row[0])}
    assert named == set(control.REQUESTS)
    assert set(control.FIXED) <= named


def test_the_page_lists_the_members_of_every_message_to_a_client() -> None:
    listed = {kind: row for title, row in members("Coordinator to client").items() for kind in title.split("`, `")}
    declared = {kind: {*message._fields} - {"data"} for kind, message in control.TO_CLIENT.items()}
    declared.update(stop=set(), kill=set(), detach={"released"})
    declared["output"] -= {"time", "attempt"}
    assert declared == listed


def test_golden_enrolment() -> None:
    """The lines of an agent and its coordinator, and who says what; a proof can be computed from the page."""
    pin, secret, key = hashlib.sha256(b"test").hexdigest(), "2b7e151628aed2a6abf7158809cf4f3c" * 2, "1d" * 32
    places = Register(PLAN.job, secret, pin, ["3"], make_key=lambda: key)
    enrol, claim, welcome, redial, again, denied = GOLDEN["enrolment"].encode().splitlines(keepends=True)
    nonces = ("f0" * 16, "0f" * 16)
    words = GOLDEN["words"].rstrip("\n")
    assert json.loads(claim)["proof"] == hmac.new(secret.encode(), words.encode(), "sha256").hexdigest()
    assert enrolment.enrol(nonces[0]) == enrol
    assert enrolment.nonce_of(enrol) == nonces[0]
    for line, word, with_program, kind in ((claim, secret, True, "claim"), (redial, key, False, "redial")):
        proof = enrolment.proof(word, "agent", kind, job=PLAN.job, place="3", pin=pin, nonces=nonces)
        made = enrolment.Claim(kind == "redial", PLAN.job, "3", nonces[1], proof, with_program)
        assert enrolment.claim(made) == line
    answers = [places.decide(line, nonces[0], "10.0.0.7:41234") for line in (claim, redial)]
    assert [answer.reply for answer in answers] == [welcome, again]
    proof = enrolment.proof(secret, "agent", "claim", job=PLAN.job, place="3", pin=pin, nonces=(nonces[0], "other"))
    second = enrolment.claim(enrolment.Claim(False, PLAN.job, "3", "other", proof))
    assert places.decide(second, nonces[0], "10.0.0.8:5").reply == denied


def test_the_page_lists_the_lines_of_the_enrolment() -> None:
    listed = {row[0].strip("`"): set(re.findall(r"`(\w+)`", row[2])) for row in rows("Enrolment")}
    said: dict[str, set[str]] = {}
    for line in GOLDEN["enrolment"].splitlines():
        members = json.loads(line)
        said.setdefault(members.pop("type"), set()).update(members)
    assert said == listed


def test_golden_plan() -> None:
    golden = json.loads(GOLDEN["plan"])
    assert json.loads(json.dumps(plans.to_json(PLAN))) == golden
    assert plans.from_json(golden) == PLAN


@pytest.fixture
def submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobRequest:
    """What a user asks for whose files are the golden ones."""
    monkeypatch.setenv("HOME", str(tmp_path))
    return JobRequest(
        command=("python", "train.py"),
        workers=2,
        servers=1,
        cwd="/srv/code",
        launcher="ssh",
        name="digits",
        hosts=parse.find(None, "ann@d1,d2", {}),
        reach={"connect_s": "10"},
        settings=(Setting("OMP_NUM_THREADS", "4"), Setting("API_KEY", "s3cret", role="worker", hidden=True)),
    )


def test_golden_files_of_a_job(submitted: JobRequest, tmp_path: Path) -> None:
    folder = JobStore(tmp_path).submit("digits-7f3", submitted.to_json())
    ssh = backends.load("ssh")
    folder.allocate(planning.allocate(submitted, ssh, ssh.inventory(submitted.hosts)).to_json())
    for name, golden in (("request", GOLDEN["request"]), ("allocation", GOLDEN["allocation"])):
        text = (folder.path / f"{name}.json").read_text()
        assert text.replace(json.loads(text)["time"], json.loads(golden)["time"]) == golden
        assert "s3cret" not in text


def test_golden_publish_line(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    monkeypatch.setenv("DISTRUN_PUBLISH_FD", str(writing))
    reporting.publish({"address": "10.0.0.1", "port": "40000"})
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        assert pipe.read().decode() == GOLDEN["publish"]


def test_the_page_lists_every_kind_with_its_code() -> None:
    assert [(int(row[0]), row[1]) for row in rows("Kinds")] == [(int(kind), kind.name) for kind in Kind]


def test_the_page_lists_every_codec_with_its_number() -> None:
    listed = {int(row[0]): row[1].strip("`") for row in rows("Codecs") if row[0].isdigit() and row[1] in _names()}
    assert listed == {codec.number: codec.name for codec in CODECS.values()}


def _names() -> set[str]:
    return {"`%s`" % name for name in CODECS}


def test_the_page_lists_every_element_type_with_its_code() -> None:
    listed = re.findall(r"(\d+) ((?:b?float|u?int)\d+)", PAGE.replace("\n", " "))
    assert [(int(code), name) for code, name in listed] == [(code, name_of(dtype)) for code, dtype in enumerate(DTYPES)]


def test_the_page_lists_the_versions() -> None:
    assert "message head %d (" % message.VERSION in section("Versions")
    assert "agent frames %d\n" % session.VERSION in section("Versions")
    assert "enrolment %d\n" % enrolment.VERSION in section("Versions")
    assert "plan %d\n" % plans.VERSION in section("Versions")


def members(title: str) -> dict[str, set[str]]:
    return {row[0].strip("`"): set(re.findall(r"`(\w+)`", row[1])) for row in rows(title)}


OF_THE_CHANNEL = {"resume_key", "chunk", "last", "fault"}
"""Members that a channel or session adds."""


def test_the_page_lists_what_the_coordinator_sends() -> None:
    begin, runtime = messages.begin(PLAN, Secrets("t", {"API_KEY": "k"}), "7"), messages.runtime("ab", b"PK")
    sent = {str(each.header["type"]): set(each.header) - {"type"} for each in (begin, runtime, messages.stream())}
    sent.update((each.TYPE, {field.name for field in fields(each)} - {"host"}) for each in actions() if each.TYPE)
    listed = members("Coordinator to agent")
    for kind, names in sent.items():
        assert names == listed[kind] - OF_THE_CHANNEL, kind
    assert set(listed) == set(Agent._HANDLERS) == {*sent, "copy", "files", "leave"}
    for kind, handler in Agent._HANDLERS.items():
        taken = {*inspect.signature(handler).parameters} - {"self", "_", "body", "header", "source"}
        given = {"version", "host", "place", "token", "secret_env"} if kind == "begin" else {"fault", "last", "chunk"}
        assert taken <= listed[kind] <= taken | given, kind


def actions() -> list[type[messages.AgentAction]]:
    return messages.AgentAction.__subclasses__()


def test_the_page_lists_what_the_agent_sends() -> None:
    """As its source says it: each `say(Message, member=...)` and `_say(...)`, and `send` of frames without a class."""
    found: dict[str, set[str]] = {}
    for path in (ROOT / "runtime" / "distrun_runtime" / "agent").glob("*.py"):
        for call in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.args:
                first = call.args[0]
                if call.func.attr in ("say", "_say") and hasattr(agent_messages, getattr(first, "id", "")):
                    kind = agent_messages.TYPES[getattr(agent_messages, first.id)]
                    found.setdefault(kind, set()).update(word.arg for word in call.keywords if word.arg)
                elif call.func.attr == "send" and isinstance(first, ast.Dict):
                    pairs = zip(first.keys, first.values, strict=True)
                    values = {ast.literal_eval(key): value for key, value in pairs if key}
                    kind = ast.literal_eval(values.pop("type"))
                    found[kind] = set(values)
    listed = members("Agent to coordinator")
    assert set(found) == set(listed)
    assert set(agent_messages.FROM_AGENT) == set(listed)
    for kind, names in found.items():
        assert names - {"data"} <= listed[kind], kind
    ours = {"host", "arrived", "time", "refused", "by", "data", "facts", "value"}
    for kind, event in agent_messages.FROM_AGENT.items():
        assert set(event.__annotations__) - ours <= listed[kind], kind
