"""A job whose workers train on records in a bucket: each reads its part of the bytes, and no more."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from distrun_cli import Distrun
from objectservers import ObjectServer, objects, refusal, times

from distrun_runtime.data import IRHeader, RecordWriter, pack_image
from distrun_runtime.data.remote import BLOCK_BYTES

__all__ = ["objects"]

pytest.importorskip("s3fs", reason="S3 is read by s3fs: pip install s3fs")
pytest.importorskip("PIL", reason="images are read by Pillow: pip install pillow")

PROGRAM = """\
import os
import sys

import numpy as np

# The server counts bytes by access key, and each worker has a disk of its own.
os.environ["AWS_ACCESS_KEY_ID"] = "worker-" + os.environ["DMLC_WORKER_ID"]
os.environ["XDG_CACHE_HOME"] += "/" + os.environ["DMLC_WORKER_ID"]

from distrun_runtime import kvstore
from distrun_runtime.data import ImageRecords, Reader, RecordFile

kv = kvstore.create("dist_sync")
images = ImageRecords(RecordFile("s3://data/train.rec", "s3://data/train.idx"), (3, 32, 32))
reader = Reader(images, 20, num_parts=kv.num_workers, part_index=kv.rank, shuffle=True, seed=1)
weight = np.zeros(2)
kv.init("w", weight)
losses = []
for epoch in range(3):
    errors = []
    for data, label in reader:
        mean = data.mean(axis=(1, 2, 3)) / 255
        examples = np.stack([mean, np.ones_like(mean)], axis=1)
        error = examples @ weight - label
        errors.append(float((error**2).mean()))
        total = np.empty(2)
        kv.pushpull("w", examples.T @ error / len(label), out=total)
        weight -= 0.3 * total / kv.num_workers
    losses.append(sum(errors) / len(errors))
print("losses", *(f"{loss:.4f}" for loss in losses))
"""


def test_two_workers_train_from_a_bucket_and_each_reads_half_of_the_bytes(
    objects: ObjectServer, tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    with RecordWriter(tmp_path / "train.rec", tmp_path / "train.idx") as file:
        for i in range(1200):
            level = int(rng.integers(2))
            image = rng.integers(100 * level, 100 * level + 100, (64, 64, 3), np.uint8)
            file.write(pack_image(IRHeader(0, float(level), i), image, form="BMP"))
    for name in ("train.rec", "train.idx"):
        objects.put("data", name, (tmp_path / name).read_bytes())
    size = (tmp_path / "train.rec").stat().st_size
    assert size > 12 * BLOCK_BYTES
    objects.fault = times(4, refusal("503 Slow Down", "SlowDown"))
    (tmp_path / "train.py").write_text(PROGRAM)
    done = Distrun(tmp_path).run(
        "launch", "-n", "2", "-s", "1", "--launcher", "local", sys.executable, str(tmp_path / "train.py")
    )
    assert done.returncode == 0, done.stderr.decode()
    lines = [line for line in done.stdout.decode().splitlines() if "losses" in line]
    assert len(lines) == 2
    for line in lines:
        losses = [float(word) for word in line.partition("losses")[2].split()]
        assert losses[-1] < losses[0] / 3
    parts = [objects.ranges("train.rec", f"worker-{rank}") for rank in range(2)]
    for ranges in parts:
        assert len(set(ranges)) == len(ranges), "what is on the disk was read again"
        read = sum(end - begin for begin, end in ranges)
        assert abs(read - size / 2) <= BLOCK_BYTES
    assert len(set(parts[0]) & set(parts[1])) <= 1, "only the block at the cut is read by both"
    assert {begin for ranges in parts for begin, _ in ranges} == set(range(0, size, BLOCK_BYTES))
