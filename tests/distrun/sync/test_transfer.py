"""What rsync says of its progress, and how fast it is."""

from __future__ import annotations

import os
import random
import subprocess
from pathlib import Path

import pytest

from distrun.sync import rsync, tree
from distrun.sync.rsync import Rate, RsyncProgress, Transfer
from distrun.sync.rules import CopyRules
from distrun.sync.tree import scan

SUMS = [0, 0, 100, 100, 600, 1000]
"""The folder itself, a file of 100 bytes, a folder, files of 500 and 400 bytes."""


def progress_after(*lines: str, sums: list[int] = SUMS) -> RsyncProgress:
    """Return what is known once rsync has written these lines, ended as it ends them while it is under way."""
    text = "".join(line + "\r" for line in lines)
    transfer = Transfer(["printf", "%s", text], dict(os.environ), answer_s=60.0, sums=sums)
    transfer.run()
    return transfer.progress


def test_files_that_the_host_had_already_count_as_done() -> None:
    assert progress_after("            400  40%    1.00MB/s    0:00:00  ") == RsyncProgress(0, 400, 400)
    done = "            500  50%    1.00MB/s    0:00:00 (xfr#1, to-chk=1/5)"
    assert progress_after(done) == RsyncProgress(1, 500, 600), "100 of the file that was not sent, and these 500"
    assert progress_after(done, "            700  70%  1.00MB/s    0:00:00  ") == RsyncProgress(1, 700, 800)
    end = "            900  90%  1.00MB/s    0:00:00 (xfr#2, to-chk=0/5)  "
    assert progress_after(done, end) == RsyncProgress(2, 900, 1000)


def test_a_tree_that_has_grown_since_is_done_at_most_whole() -> None:
    assert progress_after("      2,000  50%    1.00MB/s    0:00:00 (xfr#3, to-chk=0/9)").done == 1000


def test_without_a_listing_what_is_sent_is_what_is_done() -> None:
    assert progress_after("      500  50%    1.00MB/s    0:00:00 (xfr#1, ir-chk=1/5)", sums=[]) == RsyncProgress(
        1, 500, 500
    )


def test_the_sums_of_a_listing_are_in_the_order_of_the_copy(tmp_path: Path) -> None:
    source = tmp_path / "source"
    sizes = random.Random(7)
    for name in ("a", "b.d/x", "b", "b-c/d/e", "b-c/f", "é", "z/y", "Z", ".hidden", "z/_"):
        path = source / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(sizes.randrange(1, 99999)))
    (source / "link").symlink_to("a")
    (source / "empty").mkdir()
    (sums,) = scan(str(source), CopyRules()).sums
    assert sums[-1] == scan(str(source), CopyRules()).size
    argv = rsync.sending(
        rsync.find(), [], "%s/" % source, "host", shell=[], rsync_path="", partial=".part", stall_s=60.0
    )
    local = [word for word in argv[:-1] if not word.startswith(("--rsh", "--rsync-path"))]
    done = subprocess.run(
        [*local, str(tmp_path / "copy")], capture_output=True, check=True, env={**os.environ, "LC_ALL": "C"}
    )
    passed = []

    class Seen(Transfer):
        def _note_progress(self, match: object) -> None:
            super()._note_progress(match)  # type: ignore[arg-type]
            passed.append((self.progress.size, self.progress.done))

    transfer = Seen([], {}, answer_s=1.0, sums=sums)
    transfer._take_out(done.stdout)
    assert len(passed) >= 10
    assert [size for size, _ in passed] == [done for _, done in passed], "all is sent, so both are the same"


def test_sums_count_folders_as_entries_and_only_files_as_bytes() -> None:
    output = b"4096 .d..t...... ./\n5 >f+++++++++ a\n4096 cd+++++++++ d/\n7 >f+++++++++ d/b\n3 cL+++++++++ l -> a\n"
    assert list(tree.sums(output)) == [0, 0, 5, 5, 12, 12]
    assert tree.entries(output) == [(b"a", 5), (b"d/b", 7), (b"l -> a", 0)]


def test_a_rate_is_measured_over_some_seconds_since_rsync_speaks_once_a_second() -> None:
    rate = Rate()
    rates = []
    for tick in range(100):  # ten a second
        rate.add(tick / 10, tick // 10 * 1000)
        rates.append(rate.value())
    known = [each for each in rates if each is not None]
    assert rates[:30] == [None] * 30, "nothing sent in the first second, and two more to measure in"
    assert min(known) > 0
    assert known[-1] == pytest.approx(1000, rel=0.2)


def test_a_rate_falls_to_nothing_when_nothing_is_sent_any_more() -> None:
    rate = Rate()
    for tick in range(200):
        rate.add(tick / 10, 5000 * min(tick, 50))
    assert rate.value() == 0
