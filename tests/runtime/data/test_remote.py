"""Data in object stores: read in parts, ahead of need and through a disk cache; faults are survived or named.

S3 is moto's server with the traffic of boto; Google's and Azure's clients talk to a stand-in of the requests they make.
"""

from __future__ import annotations

import base64
import concurrent.futures
import datetime
import gzip
import math
import os
import pickle
import random
import re
import ssl
import stat
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from distrun_cli import wait_until
from objectservers import ObjectServer, cut, objects, refusal, slow, times
from webservers import Reply, Server, servers

from distrun_runtime.data import (
    CIFAR10,
    MNIST,
    Reader,
    RecordFile,
    RecordWriter,
    cifar10_files,
    mnist_files,
    objectstores,
    read_idx,
    remote,
)
from distrun_runtime.data.reader import Batch
from distrun_runtime.data.remote import BLOCK_BYTES, DiskCache
from distrun_runtime.errors import DataError, TimedOut

__all__ = ["objects", "servers"]

pytest.importorskip("s3fs", reason="S3 is read by s3fs: pip install s3fs")

CONTENT = np.random.default_rng(0).bytes(6 * BLOCK_BYTES + 12345)


def records_at(server: ObjectServer, folder: Path, count: int = 5000, size: int = 1200) -> tuple[str, str, list[bytes]]:
    """Store a file of records and its index; return both addresses and the records."""
    records = [struct.pack("<I", i) + np.random.default_rng(i).bytes(size - 4) for i in range(count)]
    with RecordWriter(folder / "a.rec", folder / "a.idx") as file:
        for record in records:
            file.write(record)
    rec, idx = (server.put("data", name, (folder / name).read_bytes()) for name in ("a.rec", "a.idx"))
    return rec, idx, records


def read_and_kept(url: str) -> bytes:
    """Return an object's bytes when the cache has them, too."""
    data = remote.opened(url)
    content = data[:]
    wait_until(lambda: not data._writing, 20, "the blocks to be on the disk")
    return content


class Numbers:
    """A data set of a record file: the first word of each record."""

    def __init__(self, records: RecordFile) -> None:
        self.records = records

    def __len__(self) -> int:
        return len(self.records)

    def cut(self, num_parts: int, part_index: int) -> Numbers:
        return Numbers(self.records.cut(num_parts, part_index))

    def expect(self, positions: Any) -> None:
        self.records.expect(positions)

    def read(self, positions: Any) -> Batch:
        found = np.array([struct.unpack_from("<I", self.records[i])[0] for i in positions.tolist()])
        return found, found


def numbers_of(reader: Reader) -> list[int]:
    return [int(number) for _, labels in reader for number in labels]


def test_records_of_an_object_are_those_of_the_file(objects: ObjectServer, tmp_path: Path) -> None:
    rec, idx, records = records_at(objects, tmp_path)
    assert list(RecordFile(rec)) == records
    file = RecordFile(rec, idx)
    assert [file[i] for i in (4999, 7, 2500)] == [records[i] for i in (4999, 7, 2500)]
    assert [record for part in range(3) for record in file.cut(3, part)] == records
    assert list(pickle.loads(pickle.dumps(file.cut(3, 1)))) == list(file.cut(3, 1))


@pytest.mark.parametrize("by", ["bytes", "count"])
def test_a_part_reads_the_bytes_of_that_part_alone(by: str, objects: ObjectServer, tmp_path: Path) -> None:
    rec, idx, _ = records_at(objects, tmp_path)
    size = (tmp_path / "a.rec").stat().st_size
    found = numbers_of(Reader(Numbers(RecordFile(rec, idx)), 32, num_parts=2, part_index=1, by=by))
    assert found == list(range(5000 - len(found), 5000))
    ranges = objects.ranges("a.rec")
    assert min(begin for begin, _ in ranges) >= size // 2 - BLOCK_BYTES
    assert sum(end - begin for begin, end in ranges) <= size // 2 + BLOCK_BYTES
    assert len(set(ranges)) == len(ranges), "a block was read twice"


def test_shuffled_examples_are_requested_before_they_are_read(objects: ObjectServer, tmp_path: Path) -> None:
    rec, idx, _ = records_at(objects, tmp_path)
    numbers = Numbers(RecordFile(rec, idx))
    objects.asked.clear()
    batches = iter(Reader(numbers, 2, shuffle=True, seed=1))
    read = next(batches)[1].tolist()
    # Two batches touch four blocks at most.
    wait_until(lambda: len(set(objects.ranges("a.rec"))) > 4, 10, "requests for later batches")
    rest = [number for _, labels in batches for number in labels.tolist()]
    assert sorted(read + rest) == list(range(5000))


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("shuffle", [False, True])
def test_many_ranges_are_requested_at_the_same_time(
    shuffle: bool, servers: Callable[[], Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "BLOCK_BYTES", 50_000)
    with RecordWriter(tmp_path / "a.rec", tmp_path / "a.idx") as file:
        for i in range(600):
            file.write(struct.pack("<I", i) + bytes(996))
    now, most, answers = 0, 0, web((tmp_path / "a.rec").read_bytes())
    change = threading.Condition()

    def answer(method: str, path: str, headers: dict[str, str]) -> Reply:
        nonlocal now, most
        if headers["Range"] != "bytes=0-0":
            with change:
                now += 1
                most = max(most, now)
                change.notify_all()
                change.wait_for(lambda: most >= 4, 2)
                now -= 1
        return answers(method, path, headers)

    server = servers()
    server.answer = answer
    numbers = Numbers(RecordFile(server.url + "/data/x", tmp_path / "a.idx"))
    assert sorted(numbers_of(Reader(numbers, 5, shuffle=shuffle, seed=1))) == list(range(600))
    assert most >= 4


def test_examples_of_a_batch_for_a_torch_loader_are_requested_together(objects: ObjectServer, tmp_path: Path) -> None:
    rec, idx, records = records_at(objects, tmp_path)
    file = RecordFile(rec, idx)
    objects.asked.clear()
    expected: list[list[int]] = []
    file.expect = lambda positions: expected.append(positions.tolist())  # type: ignore[method-assign]
    assert file.__getitems__([4000, 3, 2000]) == [records[4000], records[3], records[2000]]
    assert expected == [[4000, 3, 2000]]


def test_what_is_expected_beyond_the_end_is_not_requested(objects: ObjectServer) -> None:
    data = remote.opened(objects.put("data", "x", CONTENT))
    data.expect([(len(CONTENT) - 1, len(CONTENT) + 3 * BLOCK_BYTES)])
    assert data[-1:] == CONTENT[-1:]
    assert objects.ranges("x") == [(6 * BLOCK_BYTES, len(CONTENT))]


def test_memory_of_an_open_object_is_bounded(objects: ObjectServer) -> None:
    data = remote.opened(objects.put("data", "x", np.random.default_rng(1).bytes(30 * BLOCK_BYTES)))
    data.expect_all(0, len(data))
    for begin in range(0, len(data), 1000):
        data[begin : begin + 1000]
        assert len(data._blocks) <= remote.AHEAD_BLOCKS + remote.KEPT_BLOCKS


def test_what_was_read_once_comes_from_the_disk_also_for_another_process(objects: ObjectServer) -> None:
    url = objects.put("data", "x", CONTENT)
    assert read_and_kept(url) == CONTENT
    assert sum(end - begin for begin, end in objects.ranges("x")) == len(CONTENT)
    objects.asked.clear()
    text = "import sys; from distrun_runtime.data import remote; sys.stdout.buffer.write(remote.opened(sys.argv[1])[:])"
    done = subprocess.run([sys.executable, "-c", text, url], capture_output=True, check=True)
    assert done.stdout == CONTENT
    assert objects.ranges("x") == []


def test_the_cache_is_this_users_alone(objects: ObjectServer, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "distrun" / "data"
    folder.mkdir(parents=True)
    folder.chmod(0o755)
    read_and_kept(objects.put("data", "x", CONTENT))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


def test_a_damaged_block_of_the_cache_is_read_anew(objects: ObjectServer, tmp_path: Path) -> None:
    url = objects.put("data", "x", CONTENT)
    read_and_kept(url)
    for path in (tmp_path / "cache" / "distrun" / "data").glob("*-2"):
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert remote.opened(url)[:] == CONTENT


def test_a_new_version_of_an_object_is_never_taken_from_the_cache(objects: ObjectServer) -> None:
    read_and_kept(objects.put("data", "x", CONTENT))
    assert remote.opened(objects.put("data", "x", CONTENT[::-1]))[:] == CONTENT[::-1]


def test_without_a_cache_every_process_reads_from_the_store(
    objects: ObjectServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DISTRUN_DATA_CACHE_BYTES", "0")
    url = objects.put("data", "x", CONTENT)
    for _ in range(2):
        assert remote.opened(url)[:] == CONTENT
    assert sum(end - begin for begin, end in objects.ranges("x")) == 2 * len(CONTENT)
    assert not (tmp_path / "cache").exists()


def test_a_cache_that_cannot_be_made_is_said_and_the_data_is_read(
    objects: ObjectServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    url = objects.put("data", "x", b"abc")
    with pytest.warns(UserWarning, match="not kept on the disk: .* fix: set XDG_CACHE_HOME"):
        assert remote.opened(url)[:] == b"abc"


def bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.name != remote.COUNT)


def test_processes_together_keep_the_limit(tmp_path: Path) -> None:
    limit, most = 500_000, 0
    text = """\
import sys
from distrun_runtime.data.remote import DiskCache
cache = DiskCache(sys.argv[1], int(sys.argv[2]))
for i in range(60):
    cache.write(f"{sys.argv[3]}-{i}", bytes(10_000))
"""
    words = [sys.executable, "-c", text, str(tmp_path), str(limit)]
    writers = [subprocess.Popen([*words, str(which)]) for which in range(3)]
    while any(writer.poll() is None for writer in writers):
        names = [path for path in tmp_path.iterdir() if path.name[0].isdigit()]
        most = max(most, len(names) * 10_065)
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    assert most <= limit
    assert 0.8 * limit < bytes_in(tmp_path) <= limit
    assert int((tmp_path / remote.COUNT).read_text()) >= bytes_in(tmp_path)


def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    cache = DiskCache(str(tmp_path), 50_000)
    for i in range(4):
        cache.write(str(i), bytes(10_000))
        os.utime(tmp_path / str(i), (i, i))
    assert cache.read("0") == bytes(10_000)  # used now
    cache.write("4", bytes(10_000))
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != remote.COUNT) == ["0", "2", "3", "4"]


def test_what_a_dead_process_left_half_written_is_removed_and_counts(tmp_path: Path) -> None:
    left = tmp_path / ".new-dead"
    left.write_bytes(bytes(30_000))
    os.utime(left, (1, 1))
    cache = DiskCache(str(tmp_path), 50_000)
    for i in range(4):
        cache.write(str(i), bytes(10_000))
    assert not left.exists()
    assert bytes_in(tmp_path) <= 50_000


def test_threads_read_any_parts_while_the_cache_has_no_room_for_all(
    objects: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISTRUN_DATA_CACHE_BYTES", "100000")
    content = CONTENT[:300_000]
    data = remote.RemoteBytes(replace(remote.opened(objects.put("data", "x", content)).found, block_bytes=20_000))

    def read(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(40):
            begin, length = int(rng.integers(len(content))), int(rng.choice([5, 1000, 90_000]))
            if rng.integers(4) == 0:
                data.expect([(begin, begin + length), (int(rng.integers(len(content))), len(content))])
            assert data[begin : begin + length] == content[begin : begin + length]

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(read, range(4)))


def test_a_forked_process_reads_with_requests_of_its_own(objects: ObjectServer) -> None:
    data = remote.opened(objects.put("data", "x", CONTENT))
    data.expect_all(0, len(data))
    assert data[:100] == CONTENT[:100]
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        os.write(theirs, data[-100:] + data[:100])
        os._exit(0)
    os.close(theirs)
    with open(ours, "rb") as pipe:
        assert pipe.read() == CONTENT[-100:] + CONTENT[:100]
    os.waitpid(child, 0)


def test_a_process_that_ends_in_the_midst_of_requests_says_nothing(objects: ObjectServer) -> None:
    url = objects.put("data", "x", CONTENT)
    text = (
        "import sys; from distrun_runtime.data import remote; d = remote.opened(sys.argv[1]); d.expect_all(0, len(d))"
    )
    done = subprocess.run([sys.executable, "-c", text, url], capture_output=True, text=True, check=True)
    assert done.stderr == ""


# Faults


@pytest.mark.parametrize(
    "fault",
    [
        refusal("503 Slow Down", "SlowDown", "Please reduce your request rate."),
        refusal("500 Internal Server Error", "InternalError"),
        refusal("400 Bad Request", "RequestTimeout"),
        cut,
    ],
    ids=["503", "500", "timeout", "cut"],
)
def test_faults_that_pass_are_survived(fault: Any, objects: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objectstores, "pause_s", lambda attempt, chance: 0)
    url = objects.put("data", "x", CONTENT)
    data = remote.opened(url)
    objects.fault = times(5, fault)
    assert data[:] == CONTENT


def test_retries_draw_no_numbers_of_the_program(objects: ObjectServer) -> None:
    """A seed gives the same numbers, whatever a store does; and a test of random values meets no change of them."""
    data = remote.opened(objects.put("data", "x", b"abc"))
    objects.fault = times(2, refusal("503 Slow Down", "SlowDown"))
    before = random.getstate()
    assert data[:] == b"abc"
    assert random.getstate() == before


def test_a_request_that_hangs_is_sent_again(objects: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    url = objects.put("data", "x", b"abc")
    remote.opened(url)  # a client takes its time to start
    monkeypatch.setenv("DISTRUN_DATA_TIMEOUT", "2")
    data = remote.opened(url)
    objects.fault = times(1, slow(3))
    assert data[:] == b"abc"


def test_a_store_that_stays_down_is_named_after_the_deadline(
    objects: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = objects.put("data", "x", b"abc")
    remote.opened(url)  # a client takes its time to start
    monkeypatch.setenv("DISTRUN_DATA_TIMEOUT", "2")
    objects.fault = refusal("503 Slow Down", "SlowDown", "Please reduce your request rate.")
    with pytest.raises(TimedOut) as raised:
        remote.opened(url)
    assert re.fullmatch(
        r"s3://data/x \(bucket data, key x\): no whole answer for bytes 0 to 1 in 2 s \(DISTRUN_DATA_TIMEOUT\) and"
        r" \d+ attempts; the last one: 503 SlowDown: Please reduce your request rate\.; credentials:"
        r" environment variables",
        str(raised.value),
    )


def test_a_store_that_cannot_be_reached_is_named_after_the_deadline(
    monkeypatch: pytest.MonkeyPatch, objects: ObjectServer, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DISTRUN_DATA_TIMEOUT", "5")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(TimedOut, match=r"key x\): no whole answer .* Could not connect to the endpoint URL"):
        remote.opened("s3://data/x")
    assert sum("Could not connect" in line and "trying again" in line for line in caplog.messages) == 1


@pytest.mark.parametrize("content", [CONTENT[::-1], b"short"], ids=["other bytes", "shorter"])
def test_an_object_that_changes_is_an_error_that_names_both_versions(content: bytes, objects: ObjectServer) -> None:
    url = objects.put("data", "x", CONTENT)
    data = remote.opened(url)
    data[:10]
    objects.put("data", "x", content)
    now = remote.opened(url).found
    with pytest.raises(DataError) as raised:
        data[-10:]
    assert f"version {data.found.version} of {len(CONTENT)} bytes was opened" in str(raised.value)
    assert f"version {now.version} of {len(content)} bytes is there now. fix: start the job anew" in str(raised.value)


def test_an_object_that_is_removed_is_missing(objects: ObjectServer) -> None:
    data = remote.opened(objects.put("data", "x", CONTENT))
    objects.client().delete_object(Bucket="data", Key="x")
    with pytest.raises(FileNotFoundError, match=r"s3://data/x .* 404 NoSuchKey"):
        data[:10]


def test_a_missing_object_and_a_missing_bucket_are_told_apart(objects: ObjectServer) -> None:
    objects.put("data", "x", b"")
    with pytest.raises(FileNotFoundError, match=r"bucket data, key y\): 404 NoSuchKey: .* fix: check the address"):
        RecordFile("s3://data/y")
    with pytest.raises(FileNotFoundError, match=r"bucket other, key y\): 404 NoSuchBucket"):
        RecordFile("s3://other/y")


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        (
            refusal("403 Forbidden", "AccessDenied", "Access Denied"),
            PermissionError,
            r"key x\): 403 AccessDenied: Access Denied; credentials: environment variables\. fix: allow .* s3:GetO",
        ),
        (
            refusal("400 Bad Request", "ExpiredToken", "The provided token has expired."),
            PermissionError,
            r"400 ExpiredToken: The provided token has expired\..* fix: set AWS_PROFILE",
        ),
        (
            refusal("400 Bad Request", "AuthorizationHeaderMalformed", "the region is wrong", region="eu-west-1"),
            OSError,
            r"The bucket is in region eu-west-1\. fix: set AWS_DEFAULT_REGION to it",
        ),
        (refusal("405 Method Not Allowed", "MethodNotAllowed", "no"), OSError, r"key x\): 405 MethodNotAllowed: no;"),
    ],
    ids=["denied", "expired", "region", "other"],
)
def test_what_the_store_refuses_is_said_at_once_with_what_to_do(
    fault: Any, kind: type[OSError], message: str, objects: ObjectServer
) -> None:
    url = objects.put("data", "x", CONTENT)
    objects.fault = fault
    with pytest.raises(kind, match=message):
        remote.opened(url)


def test_the_source_of_the_credentials_is_named_and_they_are_not(
    objects: ObjectServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, servers: Callable[[], Server]
) -> None:
    url = objects.put("data", "x", b"")
    objects.fault = refusal("403 Forbidden", "AccessDenied", "Access Denied")

    def credentials() -> str:
        with pytest.raises(PermissionError) as raised:
            remote.opened(url)
        assert "secret" not in "".join(traceback.format_exception(raised.value))
        return str(raised.value).partition("credentials: ")[2].partition(". fix")[0]

    assert credentials() == "environment variables"
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    host = servers()
    answers = {
        "/latest/api/token": b"token",
        "/latest/meta-data/iam/security-credentials/": b"reader",
        "/latest/meta-data/iam/security-credentials/reader": b'{"Code": "Success", "AccessKeyId": "a",'
        b' "SecretAccessKey": "secret", "Token": "t", "Expiration": "2099-01-01T00:00:00Z"}',
    }
    host.answer = lambda method, path, headers: (200, answers[path], {})
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", host.url)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    import fsspec

    fsspec.filesystem("s3").clear_instance_cache()
    assert credentials() == "role of the instance"
    (tmp_path / "credentials").write_text("[lab]\naws_access_key_id = a\naws_secret_access_key = secret\n")
    monkeypatch.setenv("AWS_PROFILE", "lab")
    fsspec.filesystem("s3").clear_instance_cache()
    assert credentials() == "profile lab of the shared credentials file"
    monkeypatch.delenv("AWS_PROFILE")
    (tmp_path / "credentials").unlink()
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    fsspec.filesystem("s3").clear_instance_cache()
    assert credentials() == "none found"
    monkeypatch.setitem(fsspec.config.conf, "s3", {"anon": True})
    assert credentials() == "none (anonymous)"


# Other stores


def web(content: bytes, *, ranges: bool = True, version: str = '"1"', key: str = "") -> Callable[..., Reply]:
    """Answer as a web server with one object, in ranges or not; `key`: what a query string must have in it."""

    def answer(method: str, path: str, headers: dict[str, str]) -> Reply:
        if key not in path:
            return 403, b"", {}
        if path.partition("?")[0] != "/data/x":
            return 404, b"", {}
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", headers.get("Range", ""))
        if asked is None or not ranges:
            return 200, content, {"ETag": version}
        begin, end = int(asked[1]), min(int(asked[2]) + 1, len(content))
        if begin >= len(content):
            return 416, b"", {}
        return 206, content[begin:end], {"ETag": version, "Content-Range": f"bytes {begin}-{end - 1}/{len(content)}"}

    return answer


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("content", [CONTENT, b""], ids=["some", "empty"])
def test_a_web_server_is_read_in_ranges_or_whole(ranges: bool, content: bytes, servers: Callable[[], Server]) -> None:
    server = servers()
    server.answer = web(content, ranges=ranges)
    data = remote.opened(server.url + "/data/x")
    assert data[:] == content
    assert data[100:200] == content[100:200]
    assert len(server.asked) == 1 + (-(-len(content) // BLOCK_BYTES) if ranges else bool(content))


@pytest.mark.usefixtures("cache")
def test_a_later_range_that_is_answered_with_the_whole_object_is_cut_from_it(servers: Callable[[], Server]) -> None:
    server = servers()
    server.answer = web(CONTENT)
    url = server.url + "/data/x"
    data = remote.opened(url)
    server.answer = web(CONTENT, ranges=False)
    for each in (data, remote.opened(url)):
        assert each[2 * BLOCK_BYTES + 5 : 3 * BLOCK_BYTES + 5] == CONTENT[2 * BLOCK_BYTES + 5 : 3 * BLOCK_BYTES + 5]


@pytest.mark.usefixtures("cache")
def test_blocks_that_were_kept_of_ranges_are_none_of_a_whole_object(servers: Callable[[], Server]) -> None:
    server = servers()
    for ranges in (True, False):
        server.answer = web(CONTENT, ranges=ranges)
        assert read_and_kept(server.url + "/data/x") == CONTENT


@pytest.mark.usefixtures("cache")
def test_blocks_of_one_object_are_none_of_another_one_of_its_size_and_version(servers: Callable[[], Server]) -> None:
    for content in (CONTENT, CONTENT[::-1]):
        server = servers()
        server.answer = web(content)
        assert read_and_kept(server.url + "/data/x") == content


@pytest.mark.usefixtures("cache")
def test_a_range_that_one_of_several_servers_does_not_have_is_an_error_and_never_short(
    servers: Callable[[], Server],
) -> None:
    server = servers()
    server.answer = web(CONTENT)
    data = remote.opened(server.url + "/data/x")
    whole, part = web(CONTENT), web(CONTENT[:BLOCK_BYTES])
    server.answer = lambda *asked: (whole if asked[2].get("Range") == "bytes=0-0" else part)(*asked)
    with pytest.raises(DataError, match="has changed"):
        data[BLOCK_BYTES:]


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("told", ["bytes 0-0/*", "bytes 5-5/9", ""])
def test_a_range_without_the_objects_size_or_another_one_is_an_error(told: str, servers: Callable[[], Server]) -> None:
    server = servers()
    server.answer = lambda method, path, headers: (206, b"x", {"ETag": "1", "Content-Range": told})
    with pytest.raises(OSError, match=rf"Content-Range to be 'bytes 0-0/SIZE', found {re.escape(repr(told))}"):
        remote.opened(server.url + "/data/x")


@pytest.mark.usefixtures("cache")
def test_an_object_without_a_version_is_not_kept_for_later_jobs(servers: Callable[[], Server]) -> None:
    server = servers()
    for content in (CONTENT, CONTENT[::-1]):
        server.answer = web(content, version="")
        assert read_and_kept(server.url + "/data/x") == content


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("ranges", [True, False])
def test_a_file_with_a_content_encoding_is_read_as_it_is(ranges: bool, servers: Callable[[], Server]) -> None:
    content, server = gzip.compress(CONTENT[:3000]), servers()

    def answer(method: str, path: str, headers: dict[str, str]) -> Reply:
        status, body, more = web(content, ranges=ranges)(method, path, headers)
        return status, body, {**more, "Content-Encoding": "gzip"}

    server.answer = answer
    assert remote.opened(server.url + "/data/x")[:] == content


@pytest.mark.usefixtures("cache")
def test_an_open_does_not_wait_for_a_whole_object_whose_end_hangs_and_a_read_says_that_ranges_are_missing(
    servers: Callable[[], Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISTRUN_DATA_TIMEOUT", "2")
    server = servers()
    # More is promised than comes.
    server.answer = lambda method, path, headers: (200, CONTENT[:100], {"ETag": "1", "Content-Length": "1000"})
    data = remote.opened(server.url + "/data/x")
    assert len(data) == 1000
    with pytest.raises(TimedOut, match=r"does not answer ranges: the whole object, 1000 bytes, is read each time"):
        data[:]


@pytest.mark.usefixtures("cache")
def test_https_needs_a_certificate_that_is_trusted(servers: Callable[[], Server], tmp_path: Path) -> None:
    server = servers()
    server.answer = web(CONTENT)
    certificate = tmp_path / "server.pem"
    certificate.write_bytes(self_signed("localhost"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    server._server.socket = context.wrap_socket(server._server.socket, server_side=True)
    url = f"https://localhost:{server._server.server_port}/data/x"
    with pytest.raises(OSError, match=r"^https://localhost:\d+/data/x: .*certificate"):
        remote.opened(url)
    assert server.asked == []
    text = "import sys; from distrun_runtime.data import remote; sys.stdout.buffer.write(remote.opened(sys.argv[1])[:])"
    env = {**os.environ, "SSL_CERT_FILE": str(certificate)}
    done = subprocess.run([sys.executable, "-c", text, url], env=env, capture_output=True, check=True)
    assert done.stdout == CONTENT


def self_signed(name: str) -> bytes:
    """Return a certificate for a host, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.timezone.utc)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(subject).public_key(key.public_key())
    builder = builder.serial_number(1).not_valid_before(now).not_valid_after(now + datetime.timedelta(days=1))
    builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    pem = builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    return bytes(key.private_bytes(*form) + pem)


@pytest.mark.usefixtures("cache")
def test_a_large_object_of_a_server_without_ranges_is_refused_with_what_to_do(
    servers: Callable[[], Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objectstores, "WHOLE_LIMIT", 1 << 20)
    server = servers()
    server.answer = web(CONTENT, ranges=False)
    with pytest.raises(OSError, match=r"does not answer ranges, .* larger than 1 MiB; copy it to this machine"):
        remote.opened(server.url + "/data/x")


@pytest.mark.usefixtures("cache")
def test_a_query_string_and_a_password_are_never_shown(servers: Callable[[], Server]) -> None:
    server = servers()
    server.answer = web(b"no records at all", key="sig=good")
    at = server.url.replace("http://", "http://user:hidden@")
    signed = at + "/data/x?sig=good&X-Amz-Signature=hidden"
    assert "hidden" not in RecordFile(signed).path
    for url, kind, call in (
        (signed.replace("good", "hidden"), PermissionError, RecordFile),
        (signed.replace("/x", "/y"), FileNotFoundError, RecordFile),
        (signed, DataError, lambda url: list(RecordFile(url))),
        (signed, DataError, read_idx),
        (signed, DataError, lambda url: CIFAR10([url])),
        (signed, FileNotFoundError, RecordWriter),
    ):
        with pytest.raises(kind) as raised:
            call(url)
        assert "hidden" not in "".join(traceback.format_exception(raised.value))
        assert "data/" in str(raised.value)


@pytest.mark.usefixtures("cache")
def test_a_netrc_file_has_the_user_of_a_web_server(
    servers: Callable[[], Server], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server = servers()
    theirs = "Basic " + base64.b64encode(b"me:hidden").decode()
    allowed = web(b"abc")
    server.answer = lambda method, path, headers: (
        allowed(method, path, headers) if headers.get("Authorization") == theirs else (401, b"", {})
    )
    with pytest.raises(PermissionError, match=r"data/x: 401 .*credentials: none in the address"):
        remote.opened(server.url + "/data/x")
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password hidden\n")
    (tmp_path / "netrc").chmod(0o600)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert remote.opened(server.url + "/data/x")[:] == b"abc"


@pytest.mark.usefixtures("cache")
def test_google_and_azure_are_read_in_ranges_and_a_change_is_seen(
    servers: Callable[[], Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their clients' own requests, to a stand-in that knows nothing of credentials."""
    pytest.importorskip("gcsfs")
    pytest.importorskip("adlfs")
    import fsspec

    server = servers()
    state: dict[str, Any] = {"version": "1", "down": 0}

    def answer(method: str, path: str, headers: dict[str, str]) -> Reply:
        is_ours = path.partition("?")[0] in ("/download/storage/v1/b/bucket/o/x", "/account/bucket/x")
        if not is_ours:
            return 404, b'{"error": {"message": "No such object"}}', {}
        if state["down"]:
            state["down"] -= 1
            return 503, b"", {}
        headers = {"Range": headers.get("Range") or headers.get("x-ms-range", "")}
        status, body, more = web(CONTENT)(method, "/data/x", headers)
        more = {**more, "ETag": f'"{state["version"]}"', "X-Goog-Generation": state["version"]}
        return status, body, {**more, "x-ms-blob-type": "BlockBlob", "Content-Type": "application/octet-stream"}

    server.answer = answer
    monkeypatch.setitem(fsspec.config.conf, "gs", {"endpoint_url": server.url, "token": "anon"})
    monkeypatch.setenv(
        "AZURE_STORAGE_CONNECTION_STRING",
        f"DefaultEndpointsProtocol=http;AccountName=account;AccountKey=aGlkZGVu;BlobEndpoint={server.url}/account;",
    )
    for scheme, source in (("gs", r"none \(anonymous\)"), ("az", "connection string")):
        state["version"] = "1"
        state["down"] = 2
        data = remote.opened(f"{scheme}://bucket/x")
        assert (data[:100], data[-100:], data.found.version) == (CONTENT[:100], CONTENT[-100:], "1")
        state["version"] = "2"
        with pytest.raises(DataError, match=rf"{scheme}://bucket/x has changed .* version 1 .* version 2"):
            data[2 * BLOCK_BYTES : 2 * BLOCK_BYTES + 1]
        with pytest.raises(
            FileNotFoundError, match=rf"bucket bucket, key y\): 404.*credentials: {source}\. fix: check"
        ):
            remote.opened(f"{scheme}://bucket/y")


def test_what_reads_object_stores_or_belongs_to_other_libraries_is_not_loaded_for_files(tmp_path: Path) -> None:
    with RecordWriter(tmp_path / "a.rec", tmp_path / "a.idx") as file:
        file.write(b"a")
    text = """\
import sys
from distrun_runtime.data import RecordFile, Reader
list(RecordFile("a.rec", "a.idx"))
others = ("fsspec", "asyncio", "torch", "PIL", "zmq")
found = [name for name in sys.modules if name in others or name.startswith("distrun_runtime.data.re")]
print(*found)
"""
    done = subprocess.run([sys.executable, "-c", text], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == {"distrun_runtime.data.reader", "distrun_runtime.data.recordio"}


def test_a_missing_package_is_named_with_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(ImportError, match=r"s3:// addresses .* s3fs is missing. Type:  pip install fsspec s3fs"):
        RecordFile("s3://data/x")


def test_mnist_and_cifar_are_found_and_read_in_a_folder_of_a_bucket(objects: ObjectServer) -> None:
    images = struct.pack(">4I", 0x0803, 3, 2, 2) + bytes(range(12))
    objects.put("data", "mnist/train-images-idx3-ubyte.gz", gzip.compress(images))
    objects.put("data", "mnist/train-labels-idx1-ubyte", struct.pack(">2I", 0x0801, 3) + bytes([7, 8, 9]))
    data, labels = MNIST(*mnist_files("s3://data/mnist")).read(np.array([2, 0]))
    assert labels.tolist() == [9, 7]
    assert (data[1, 0] * 256).tolist() == [[0, 1], [2, 3]]
    with pytest.raises(FileNotFoundError, match=r"no t10k-images.* in s3://data/mnist$"):
        mnist_files("s3://data/mnist", train=False)
    objects.put("data", "cifar/cifar-10-batches-bin/test_batch.bin", bytes([4]) + bytes(3072))
    assert CIFAR10(cifar10_files("s3://data/cifar", train=False))[0][1] == 4


def test_missing_files_are_found_under_other_names_where_a_store_refuses_to_say_what_is_missing(
    objects: ObjectServer,
) -> None:
    """S3 without s3:ListBucket."""
    labels = struct.pack(">2I", 0x0801, 1) + bytes([7])
    names = [
        objects.put("data", f"mnist/train-{name}-ubyte.gz", gzip.compress(labels))
        for name in ("images.idx3", "labels.idx1")
    ]
    objects.put("data", "cifar/test_batch.bin", bytes(3073))
    keys = {name.removeprefix("s3:/") for name in names} | {"/data/cifar/test_batch.bin"}
    deny = refusal("403 Forbidden", "AccessDenied", "Access Denied")
    objects.fault = lambda environ, start: None if environ["PATH_INFO"] in keys else deny(environ, start)
    assert list(mnist_files("s3://data/mnist")) == names
    assert cifar10_files("s3://data/cifar", train=False) == ["s3://data/cifar/test_batch.bin"]
    for find in (mnist_files, cifar10_files):
        with pytest.raises(PermissionError, match=r"without s3:ListBucket, a missing object looks the same"):
            find("s3://data/other", train=False)


@pytest.mark.parametrize("address", ["s3:/data/x", "https:/host/x"])
def test_an_address_that_was_made_a_path_is_an_error_that_says_so(address: str) -> None:
    for call in (RecordFile, RecordWriter, read_idx, mnist_files):
        with pytest.raises(FileNotFoundError, match=r"has one slash, expected .* fix: give it as a str"):
            call(Path(address))


@pytest.mark.parametrize("address", ["s3://data", "s3://data/", "s3:///x"])
def test_an_address_without_bucket_or_key_says_what_is_expected(address: str) -> None:
    with pytest.raises(FileNotFoundError, match=rf"^{address} names no object, expected s3://BUCKET/KEY"):
        RecordFile(address)


def test_credentials_that_appear_late_are_found(
    objects: ObjectServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    url = objects.put("data", "x", b"abc")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    file = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))

    def pause_s(attempt: int, chance: float) -> float:
        file.write_text("[default]\naws_access_key_id = a\naws_secret_access_key = secret\n")
        return 0

    monkeypatch.setattr(objectstores, "pause_s", pause_s)
    assert remote.opened(url)[:] == b"abc"


# What an exception of a client means


class WithStatus(Exception):
    def __init__(self, status_code: int) -> None:
        super().__init__("said")
        self.status_code = status_code


def caused(name: str, cause: Exception | None) -> Exception:
    error: Exception = type(name, (Exception,), {})("none")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "kind", "attempts"),
    [
        (WithStatus(429), OSError, math.inf),
        (WithStatus(503), OSError, math.inf),
        (WithStatus(400), OSError, 1),
        (WithStatus(401), PermissionError, 1),
        (ConnectionResetError("reset"), OSError, math.inf),
        (TimeoutError(), OSError, math.inf),
        (type("NoCredentialsError", (Exception,), {})("none"), PermissionError, 3),
        (type("MetadataRetrievalError", (Exception,), {})("none"), OSError, 6),
        (type("CredentialRetrievalError", (Exception,), {})("none"), PermissionError, 6),
        (caused("RefreshError", caused("TransportError", None)), PermissionError, 6),
        (caused("HttpError", caused("RefreshError", caused("TransportError", None))), OSError, 6),
        (caused("RefreshError", None), PermissionError, 1),
        (type("ClientConnectorCertificateError", (ConnectionError,), {})("expired"), OSError, 1),
        (TypeError("a mistake"), OSError, 1),
    ],
    ids=repr,
)
def test_what_an_exception_of_a_client_means(error: Exception, kind: type[OSError], attempts: float) -> None:
    denial = objectstores.denial_of(error)
    assert (denial.kind, denial.attempts) == (kind, attempts)


def test_pauses_grow_to_a_limit_and_are_spread() -> None:
    assert [objectstores.pause_s(attempt, 1) for attempt in (1, 2, 3, 7, 99)] == [0.1, 0.2, 0.4, 5.0, 5.0]
    assert objectstores.pause_s(3, 0) == 0.2


@pytest.mark.parametrize(
    ("address", "text"),
    [
        ("/data/a?b", "/data/a?b"),
        ("s3://bucket/key", "s3://bucket/key"),
        ("https://me:pw@host:80/a/b?X-Amz-Signature=1&x=2", "https://***@host:80/a/b?***"),
        ("https://u:p@ss@host/x", "https://***@host/x"),
        ("https://host/x?sig=a b&c=d", "https://host/x?***"),
        ("https://host/x?mail=a@b", "https://host/x?***"),
    ],
)
def test_an_address_is_shown_without_secrets(address: str, text: str) -> None:
    assert objectstores.redacted(address) == text


def test_what_a_client_says_is_shown_in_short_and_without_secrets() -> None:
    text = "cannot read 'https://me:p@w@host/a?sig=1'\nat https://host/b?sig=2 now\nstring to sign: x"
    assert objectstores.redacted_text(text) == "cannot read 'https://***@host/a?***': at https://host/b?*** now"


def test_a_search_finds_what_lies_across_two_blocks(objects: ObjectServer) -> None:
    content = bytearray(3 * BLOCK_BYTES)
    content[BLOCK_BYTES - 2 : BLOCK_BYTES + 2] = content[2 * BLOCK_BYTES : 2 * BLOCK_BYTES + 4] = b"what"
    data = remote.opened(objects.put("data", "x", bytes(content)))
    assert data.find(b"what", 0) == BLOCK_BYTES - 2
    assert data.find(b"what", BLOCK_BYTES - 1) == 2 * BLOCK_BYTES
    assert data.find(b"what", 2 * BLOCK_BYTES + 1) == -1
