from __future__ import annotations

import os
import pwd
import queue
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path

import pytest
from fakehosts import FakeHosts, Sink, living, tree, write
from slowness import scaled

from distrun.errors import UsageError
from distrun.formats import quiet
from distrun.ssh.resolve import Target
from distrun.sync import rsync
from distrun.sync.copier import Copier, CopyRequest, CopyResult, error, first_failure
from distrun.sync.rules import CopyRules, make_rules
from distrun.sync.tree import Tree
from distrun_runtime.coordinator.messages import AllPrepared, PrepareFailed

LIMIT_S = 60.0


_SILENT = r"""
real=$(command -v rsync); mkdir -p "$HOME/bin"
cat >"$HOME/bin/rsync" <<END
#!/bin/sh
{ head -c 100000; sleep 600; } | "$real" "\$@"
END
chmod +x "$HOME/bin/rsync"; PATH=$HOME/bin:$PATH
"""
"""The host's rsync hears no more after the first bytes, as if the network had gone silent."""


_OLD = """#!/bin/sh
case $1 in
    --version) echo "openrsync: protocol version 29"; exit ;;
    --help) echo "usage: openrsync [-rlt] [--delete] [--exclude=PATTERN] [-e command] ..." >&2; exit 1 ;;
esac
exec %s "$@"
"""


class Bench:
    """A source, some hosts, and copies between them."""

    def __init__(self, folder: Path, login: str = "sh") -> None:
        self.hosts = FakeHosts(folder / "hosts", login)
        self.source = write(folder / "source", **{"train.py": "one", "lib/a.py": "two", ".git/HEAD": "no"})
        self.sink = Sink()

    def copier(
        self, *names: str, dst: str = "job", rules: CopyRules | None = None, delete: bool = False, **more: object
    ) -> Copier:
        self.hosts.add(*(name for name in names if not self.hosts.home(name).exists()))
        targets = {name: Target(name) for name in names}
        how = {name: more.pop(name) for name in [each.name for each in fields(CopyRequest)] if name in more}
        request = CopyRequest(str(self.source), dst, rules or CopyRules(), delete, **how)  # type: ignore[arg-type]
        options = {"shell": self.hosts.shell, "identity": self.hosts.identity, **more}
        return Copier(targets, request, self.sink, **options)  # type: ignore[arg-type]

    def copy(self, *names: str, **more: object) -> list[CopyResult]:
        return self.copier(*names, **more).copy()  # type: ignore[arg-type]

    def there(self, name: str, folder: str = "job") -> dict[str, str]:
        return tree(self.hosts.home(name) / folder)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def wait(condition: Callable[[], object], what: str) -> None:
    end = time.monotonic() + scaled(LIMIT_S)
    while not condition():
        assert time.monotonic() < end, "not within %g s: %s" % (LIMIT_S, what)
        time.sleep(0.02)


def test_every_host_gets_the_files_and_the_line_of_the_old_launcher_is_said(bench: Bench) -> None:
    results = bench.copy("d1", "d2", "d3")
    assert [(each.host, each.ok, each.files, each.size) for each in results] == [
        ("d1", True, 2, 6), ("d2", True, 2, 6), ("d3", True, 2, 6),
    ]  # fmt: skip
    for name in ("d1", "d2", "d3"):
        assert bench.there(name) == {"train.py": "one", "lib/a.py": "two"}
        assert "rsync %s/ -> %s:job" % (bench.source, name) in bench.sink.texts()
    assert bench.sink.texts()[-1].startswith("sync 3/3 (6 files, 18 B) in ")
    assert error(results) is None


def test_a_second_copy_sends_what_changed_and_keeps_what_only_the_host_has(bench: Bench) -> None:
    bench.copy("d1")
    write(bench.source, **{"train.py": "changed"})
    (bench.source / "lib" / "a.py").unlink()
    write(bench.hosts.home("d1") / "job", **{"out/model": "trained"})
    (result,) = bench.copy("d1")
    assert (result.files, result.size) == (1, 7)
    assert bench.there("d1") == {"train.py": "changed", "lib/a.py": "two", "out/model": "trained"}


@pytest.mark.parametrize("login", ["sh", "bash", "dash", "fish", "tcsh"])
def test_any_login_shell_will_do(login: str, tmp_path: Path) -> None:
    if shutil.which(login) is None:
        pytest.skip("there is no %s here" % login)
    bench = Bench(tmp_path, login)
    assert bench.copy("d1", dst="a 'b' $c!d")[0].ok
    assert bench.there("d1", "a 'b' $c!d")["train.py"] == "one"


@pytest.mark.parametrize(
    ("dst", "where"),
    [
        ("job", "job"),
        ("a/new/deep folder", "a/new/deep folder"),
        ('it\'s "a" $(touch x) `y` é\n\\z *', 'it\'s "a" $(touch x) `y` é\n\\z *'),
        ("-n", "-n"),
        ("~", "."),
        ("~/x y", "x y"),
        ("./~z", "~z"),
        ("trailing/", "trailing"),
        ("end\n", "end\n"),
    ],
)
def test_any_path_is_a_destination_and_relative_ones_are_below_the_home(dst: str, where: str, bench: Bench) -> None:
    (result,) = bench.copy("d1", dst=dst)
    assert result.ok, result.lines()
    assert bench.there("d1", where)["train.py"] == "one"
    assert not (bench.hosts.home("d1") / "x").exists()


def test_an_absolute_path_and_a_users_home_are_what_they_say(bench: Bench, tmp_path: Path) -> None:
    assert bench.copy("d1", dst=str(tmp_path / "at"))[0].ok
    assert tree(tmp_path / "at")["train.py"] == "one"
    (result,) = bench.copy("d1", dst="~no_such_user_here/x")
    assert result.reason == "there is no user ~no_such_user_here"
    with pytest.raises(UsageError, match="~USER/DIR"):
        bench.copy("d1", dst="~$(id)/x")
    with pytest.raises(UsageError, match="expected a directory"):
        bench.copy("d1", dst="")


def test_a_source_with_any_name_is_copied(bench: Bench, tmp_path: Path) -> None:
    bench.source = write(tmp_path / "a:b 'c' é [d]", **{"-x y": "1", "ü:z": "2"})
    assert bench.copy("d1")[0].ok
    assert bench.there("d1") == {"-x y": "1", "ü:z": "2"}


def test_nothing_of_a_folder_that_cannot_be_made_is_a_riddle(bench: Bench) -> None:
    bench.hosts.add("d1")
    (bench.hosts.home("d1") / "file").write_text("")
    results = bench.copy("d1", dst="file/below")
    problem = error(results)
    assert problem.exit_code == 4
    assert "cannot make file/below: %s: Not a directory" % (bench.hosts.home("d1") / "file") in str(problem)
    assert "rsync" not in str(problem), "what it says of a folder that was refused only misleads"


def test_a_folder_that_others_can_write_gets_no_file_and_is_named(bench: Bench) -> None:
    bench.hosts.add("d1", "d2")
    (bench.hosts.home("d1") / "open").mkdir(mode=0o777)
    (bench.hosts.home("d1") / "open").chmod(0o777)
    bad, good = bench.copy("d1", "d2", dst="open/job", keep_going=True)
    text = "open/job: %s/open is writable by everyone (mode 0777), so others could change what the job runs"
    assert bad.reason == text % bench.hosts.home("d1")
    assert bad.fix.startswith("on that host: chmod go-w %s/open; " % bench.hosts.home("d1"))
    assert bad.words == ()
    assert list((bench.hosts.home("d1") / "open").iterdir()) == []
    assert good.ok


def test_an_extra_gets_into_no_folder_that_others_can_write(bench: Bench, tmp_path: Path) -> None:
    """Also not by a link of the user's own that leads there."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    elsewhere.chmod(0o777)
    library = write(tmp_path / "built", **{"libmxnet.so": "so"})
    rules = make_rules(extra=["%s/libmxnet.so:lib/libmxnet.so" % library], cwd=str(tmp_path))
    shutil.rmtree(bench.source / "lib")
    bench.hosts.add("d1")
    (bench.hosts.home("d1") / "job").mkdir()
    (bench.hosts.home("d1") / "job" / "lib").symlink_to(elsewhere)
    (result,) = bench.copy("d1", rules=rules)
    assert "job/lib: %s is writable by everyone" % elsewhere in result.reason
    assert list(elsewhere.iterdir()) == []


def test_what_hosts_say_of_their_folders_is_said_once(bench: Bench) -> None:
    bench.hosts.add("d1", "d2", "d3")
    for name in ("d1", "d2", "d3"):
        bench.hosts.before(name, "echo 'distrun-sync: note %s' >&2" % ("~/job: " + ("x" if name == "d3" else "y")))
    assert all(each.ok for each in bench.copy("d1", "d2", "d3", window=1))
    assert bench.sink.texts("warning") == ["d1: ~/job: y", "d3: ~/job: x"]


def test_the_ignore_file_patterns_and_gits_list_are_kept_to(bench: Bench) -> None:
    write(bench.source, **{".distrunignore": "*.ckpt\n", "a.ckpt": "x", "data/big": "y", "k.log": "z"})
    assert bench.copy("d1", rules=CopyRules(("data",)))[0].ok
    assert set(bench.there("d1")) == {"train.py", "lib/a.py", ".distrunignore", "k.log"}
    shutil.rmtree(bench.source / ".git")
    subprocess.run(["git", "init", "-q", str(bench.source)], check=True)
    (bench.source / ".gitignore").write_text("*.log\n")
    assert bench.copy("d2", "d3", rules=CopyRules(("data",), gitignore=True))[0].ok
    for name in ("d2", "d3"):
        assert set(bench.there(name)) == {"train.py", "lib/a.py", ".distrunignore", ".gitignore"}


def test_extras_come_under_their_names(bench: Bench, tmp_path: Path) -> None:
    lib = write(tmp_path / "build dir", **{"libmxnet.so.1": "so", "py/mxnet/__init__.py": "m", "py/mxnet/x.pyc": "."})
    (lib / "libmxnet.so").symlink_to("libmxnet.so.1")
    words = [
        "%s/libmxnet.so" % lib,
        "%s/libmxnet.so:lib/other name.so" % lib,
        "%s/py/mxnet" % lib,
        "%s/py/mxnet:p/q" % lib,
    ]
    rules = make_rules(extra=words, cwd=str(tmp_path))
    expected = {
        "train.py": "one",
        "lib/a.py": "two",
        "libmxnet.so": "so",
        "lib/other name.so": "so",
        "mxnet/__init__.py": "m",
        "p/q/__init__.py": "m",
    }
    assert bench.copy("d1", "d2", rules=rules)[0].ok
    assert bench.there("d1") == bench.there("d2") == expected
    # Deleting leaves them alone, and takes what went away from the source.
    (bench.source / "train.py").unlink()
    del expected["train.py"]
    (result,) = bench.copy("d1", rules=rules, delete=True)
    assert result.ok, result.lines()
    assert bench.there("d1") == expected
    assert [path.name for path in bench.hosts.home("d1").rglob(".distrun-sync")] == [".distrun-sync"]


def test_deleting_is_for_folders_that_are_ours(bench: Bench) -> None:
    bench.hosts.add("d1", "d2")
    write(bench.hosts.home("d1") / "job", precious="data")
    (result,) = bench.copy("d1", delete=True)
    assert "job has files that distrun did not copy (no .distrun-sync in it)" in result.reason
    assert result.fix.endswith("on that host: touch %s/job/.distrun-sync" % bench.hosts.home("d1"))
    assert bench.there("d1") == {"precious": "data"}
    # A copy without deleting does not make it ours either.
    assert bench.copy("d1")[0].ok
    assert not bench.copy("d1", delete=True)[0].ok
    assert bench.there("d1")["precious"] == "data"
    # One that was made by a copy is.
    assert bench.copy("d2")[0].ok
    write(bench.hosts.home("d2") / "job", **{"old.py": "x", "__pycache__/kept.pyc": "y"})
    assert bench.copy("d2", delete=True)[0].ok
    assert bench.there("d2") == {"train.py": "one", "lib/a.py": "two", "__pycache__/kept.pyc": "y"}
    assert (bench.hosts.home("d2") / "job" / ".distrun-sync").exists()


def test_the_marker_of_a_source_that_was_a_destination_stays_at_home(bench: Bench) -> None:
    write(bench.source, **{".distrun-sync": ""})
    bench.hosts.add("d1")
    write(bench.hosts.home("d1") / "job", mine="x")
    assert bench.copy("d1")[0].ok
    assert not (bench.hosts.home("d1") / "job" / ".distrun-sync").exists()


def test_the_source_itself_as_the_destination_is_left_alone(bench: Bench) -> None:
    before = tree(bench.source)
    results = bench.copy("d1", "d2", dst=str(bench.source), delete=True)
    assert [(each.ok, each.same) for each in results] == [(True, True)] * 2
    assert tree(bench.source) == before
    assert results[0].line() == "d1: the same directory"
    assert error(results) is None


def test_two_names_of_one_host_are_copied_to_once(bench: Bench) -> None:
    results = bench.copy("d1", "alias", "d2", identity=lambda target: target.host.replace("alias", "d1"))
    assert [each.names for each in results] == [("d1", "alias"), ("d2",)]
    assert bench.there("alias") == {}
    assert bench.sink.texts()[-1].startswith("sync 3/3 ")


def test_a_failed_host_ends_the_copy_with_its_last_words(bench: Bench) -> None:
    bench.hosts.add("good")
    got: queue.SimpleQueue[object] = queue.SimpleQueue()
    targets = {"good": Target("good"), "gone": Target("gone")}
    shell, identity = bench.hosts.shell, bench.hosts.identity
    request = CopyRequest(str(bench.source), "job", CopyRules())
    Copier(targets, request, bench.sink, shell=shell, identity=identity).start(got.put)
    event = got.get(timeout=scaled(LIMIT_S))
    assert isinstance(event, PrepareFailed)
    assert event.host == "gone"
    assert event.reason.startswith("no address is known for the name gone")
    assert "Could not resolve hostname gone" in event.text
    assert "rsync error: " in event.text
    assert "fix: " in event.text
    assert bench.there("good")["train.py"] == "one"
    assert any("sync to gone" in text for text in bench.sink.texts("warning"))


def test_a_host_with_too_many_connections_is_tried_again(bench: Bench) -> None:
    bench.hosts.add("d1")
    refuses = "kex_exchange_identification: Connection closed by remote host"
    bench.hosts.before("d1", "if mkdir tried 2>/dev/null; then echo '%s' >&2; exit 255; fi" % refuses)
    assert bench.copy("d1")[0].ok
    assert bench.there("d1")["train.py"] == "one"


def test_a_fault_of_our_own_is_told_too(bench: Bench) -> None:
    def breaks(target: Target) -> list[str]:
        raise RuntimeError("broken")

    (result,) = bench.copy("d1", shell=breaks)
    assert result.reason == "RuntimeError: broken"


def test_a_copy_that_succeeds_is_an_event(bench: Bench) -> None:
    got: queue.SimpleQueue[object] = queue.SimpleQueue()
    bench.copier("d1").start(got.put)
    assert isinstance(got.get(timeout=scaled(LIMIT_S)), AllPrepared)


def test_a_host_without_rsync_is_said_with_what_to_do(bench: Bench) -> None:
    bench.hosts.add("d1")
    empty = bench.hosts.root / "bin"
    empty.mkdir()
    for name in ("mkdir", "stat", "cat", "ls", "df", "sh"):
        (empty / name).symlink_to(shutil.which(name) or name)
    bench.hosts.before("d1", "PATH=%s; export PATH" % empty)
    if os.path.exists("/usr/local/bin/rsync"):
        pytest.skip("an rsync is where it is looked for")
    (result,) = bench.copy("d1")
    assert result.reason == "there is no rsync on it"
    assert result.fix.startswith("on that host: install rsync")


def test_a_login_shell_that_prints_is_said_with_how_to_quieten_it(bench: Bench) -> None:
    bench.hosts.add("d1")
    bench.hosts.before("d1", "echo Welcome to d1, have a nice day")
    (result,) = bench.copy("d1")
    assert result.reason == "its login shell prints something, and rsync cannot work over that"
    assert not any("manpage" in line for line in result.lines())
    # Which shell it is, is known if the host's program was started before rsync here gave up.
    shown = quiet(pwd.getpwuid(os.geteuid()).pw_shell)
    assert result.fix in (shown, "this says in which file: distrun doctor --hosts d1")


def test_a_disk_that_cannot_hold_it_is_said_before_anything_is_sent(bench: Bench) -> None:
    (result,) = bench.copy("d1", tree=Tree(size=1 << 60))
    assert "too little room in job: " in result.reason
    assert "free, 1.05e+06 TiB needed" in result.reason
    assert bench.there("d1") == {}


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a host does after a copy that failed is waited for as long as a busy machine takes."""
    monkeypatch.setattr(rsync, "LAST_WORDS_S", LIMIT_S)
    monkeypatch.setattr(rsync, "KILL_AFTER_S", LIMIT_S)


def test_copies_into_one_folder_at_the_same_time_do_not_break_each_other(bench: Bench) -> None:
    bench.hosts.add("d1")
    for number in range(200):
        write(bench.source, **{"d%d/f%d" % (number % 10, number): "x" * 2000})
    for number in range(50):
        (bench.source / ("l%d" % number)).symlink_to("d1")
    results: list[CopyResult] = []
    threads = [threading.Thread(target=lambda: results.extend(bench.copy("d1"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(scaled(LIMIT_S))
    assert [line for each in results for line in each.lines() if not each.ok] == []
    assert len(results) == 4
    assert {**bench.there("d1"), ".git/HEAD": "no"} == tree(bench.source)
    assert not list(bench.hosts.home("d1").rglob(".distrun-part-*"))


def shared_folder(bench: Bench, tmp_path: Path, *names: str) -> Path:
    """Make a folder that is the same one for all of these hosts."""
    bench.hosts.add(*names)
    (tmp_path / "common").mkdir()
    return tmp_path / "common"


def test_a_folder_that_hosts_share_is_copied_to_once_however_late_a_host_comes(bench: Bench, tmp_path: Path) -> None:
    dst = shared_folder(bench, tmp_path, "d1", "d2", "d3")
    for window in (3, 1):
        results = bench.copy("d1", "d2", "d3", dst=str(dst), window=window)
        (owner,) = [each for each in results if not each.shared]
        assert all(each.ok for each in results)
        assert {each.line() for each in results if each.shared} == {
            "%s: the same directory as on %s" % (each.host, owner.host) for each in results if each is not owner
        }
    assert bench.sink.texts()[-1].startswith("sync 3/3 (0 files, 0 B) in ")
    assert tree(dst) == {"train.py": "one", "lib/a.py": "two"}
    assert not list(dst.rglob(".distrun-part-*"))
    assert not list(bench.source.rglob(".distrun-part-*"))


def let_d1_be_in_work_while_d2_asks(bench: Bench, tmp_path: Path, then: str) -> None:
    """Let d1's rsync wait until the attempt of d2, which waits for it to begin, is over; then it does `then`."""
    begun, over = (str(tmp_path / name) for name in ("begun", "over"))
    program = write(bench.hosts.home("d1"), rsync=_WAITS % (begun, over, then)) / "rsync"
    program.chmod(0o755)
    bench.hosts.before("d1", "PATH=$HOME:$PATH")
    bench.hosts.before("d2", _AFTER % (begun, over))


_WAITS = """#!/bin/sh
touch '%s'
until [ -e '%s' ]; do sleep 0.02; done
%s
"""
_AFTER = """
until [ -e '%s' ]; do sleep 0.02; done
sh -c "$*"; code=$?; touch '%s'; exit $code
"""


def test_a_shared_folder_with_files_of_the_users_is_copied_to_once_by_copies_that_meet(
    bench: Bench, tmp_path: Path
) -> None:
    dst = write(shared_folder(bench, tmp_path, "d1", "d2"), mine="x")
    let_d1_be_in_work_while_d2_asks(bench, tmp_path, 'exec %s "$@"' % shutil.which("rsync"))
    one, other = bench.copy("d1", "d2", dst=str(dst))
    assert (one.files, one.shared) == (2, "")
    assert (other.ok, other.shared) == (True, "d1")
    assert tree(dst) == {"mine": "x", "train.py": "one", "lib/a.py": "two"}
    assert sorted(os.listdir(dst)) == ["lib", "mine", "train.py"]


def test_hosts_that_share_a_folder_do_not_have_the_files_if_that_one_copy_failed(bench: Bench, tmp_path: Path) -> None:
    dst = shared_folder(bench, tmp_path, "d1", "d2")
    let_d1_be_in_work_while_d2_asks(bench, tmp_path, "exit 5")
    one, other = bench.copy("d1", "d2", dst=str(dst), keep_going=True)
    assert not one.ok
    assert other.line() == "d2: it has the same directory as d1, to which the copy failed"


def test_what_is_not_another_copys_doing_fails_at_once(bench: Bench) -> None:
    bench.hosts.add("d1")
    write(bench.hosts.home("d1") / "job", **{"train.py/mine": "x"})
    bench.hosts.before("d1", "echo run >>%s/runs" % bench.hosts.root)
    (result,) = bench.copy("d1")
    assert "some files were not copied" in result.reason
    assert len(_lines(bench.hosts.root / "runs")) == 1


@pytest.mark.usefixtures("patient")
def test_a_copy_that_is_cancelled_leaves_nothing_half_and_takes_away_what_a_killed_one_left(bench: Bench) -> None:
    bench.copy("d1")
    job = bench.hosts.home("d1") / "job"
    old, young = ".distrun-part-0ld-1", ".distrun-part-y0ung-1"
    for name in (old, young):
        write(job, **{"%s/a" % name: "x", "lib/%s/b" % name: "x"})
        (job / (name + ".on")).symlink_to("d1")
    os.utime(job / (old + ".on"), (1, time.time() - 2 * 86400), follow_symlinks=False)
    write(bench.source, **{"train.py": "newer", "big": "x" * 4_000_000})
    bench.hosts.before("d1", _SILENT)
    copier = bench.copier("d1")
    got: queue.SimpleQueue[object] = queue.SimpleQueue()
    copier.start(got.put)

    def parts() -> set[str]:
        # Not by rglob, which fails when a folder goes away under it; os.walk passes over it.
        names = {name for _, folders, files in os.walk(job) for name in folders + files}
        return {name.removesuffix(".on") for name in names if name.startswith(".distrun-part-")}

    wait(lambda: parts() - {old, young}, "it runs")
    assert parts() > {young}
    assert old not in parts()
    copier.cancel()
    assert isinstance(got.get(timeout=scaled(LIMIT_S)), PrepareFailed)
    wait(lambda: parts() == {young}, "nothing of it is left")
    assert (job / "train.py").read_text() == "one"


def test_a_host_that_goes_silent_midway_has_its_old_tree_and_the_wait_ends(bench: Bench) -> None:
    bench.copy("d1")
    write(bench.source, **{"train.py": "newer", "big": "x" * 4_000_000})
    bench.hosts.before("d1", _SILENT)
    (result,) = bench.copy("d1", stall_s=1.0)
    assert result.reason.startswith("nothing has moved for 1 s: timeout"), result.lines()
    wait(lambda: not living(str(bench.hosts.root)), "no process left")
    bench.hosts.before("d1", "")

    def there() -> dict[str, str]:
        return {name: text for name, text in bench.there("d1").items() if ".distrun-part-" not in name}

    assert there() == {"train.py": "one", "lib/a.py": "two"}
    assert bench.copy("d1")[0].ok
    assert {**there(), ".git/HEAD": "no"} == tree(bench.source)


def test_cancelling_ends_every_rsync_soon(bench: Bench) -> None:
    for name in ("d1", "d2", "d3"):
        bench.hosts.add(name)
        bench.hosts.before(name, "echo $$ >>%s/pids; sleep 600" % bench.hosts.root)
    copier = bench.copier("d1", "d2", "d3", window=2)
    got: queue.SimpleQueue[object] = queue.SimpleQueue()
    copier.start(got.put)
    wait(lambda: len(_lines(bench.hosts.root / "pids")) == 2, "two hosts in work")
    begun = time.monotonic()
    copier.cancel()
    event = got.get(timeout=scaled(LIMIT_S))
    assert isinstance(event, PrepareFailed)
    assert "interrupted" in event.reason
    assert time.monotonic() - begun < 30
    wait(lambda: not living(str(bench.hosts.root)), "no process left")
    assert len(_lines(bench.hosts.root / "pids")) == 2


def test_cancelling_waits_for_no_configuration_and_for_no_next_attempt(bench: Bench) -> None:
    bench.hosts.add("asks", "d1")
    asked, answered = threading.Event(), threading.Event()

    def shell(target: Target) -> Sequence[str]:
        if target.host == "asks":
            asked.set()
            answered.wait(scaled(LIMIT_S))
        return bench.hosts.shell(target)

    refuses = "kex_exchange_identification: Connection closed by remote host"
    bench.hosts.before("d1", "touch %s/tried; echo '%s' >&2; exit 255" % (bench.hosts.root, refuses))
    copier = bench.copier("asks", "d1", shell=shell)
    with ThreadPoolExecutor(1) as pool:
        copied = pool.submit(copier.copy)
        wait(lambda: asked.is_set() and (bench.hosts.root / "tried").exists(), "both in work")
        copier.cancel()  # returns though a configuration is still being read
        answered.set()
        results = copied.result(scaled(LIMIT_S))
    assert [(each.host, each.ok) for each in results] == [("asks", False), ("d1", False)]
    assert results[0].cancelled
    assert bench.there("asks") == bench.there("d1") == {}


def test_a_host_that_never_answers_is_given_up(bench: Bench) -> None:
    bench.hosts.add("d1")
    bench.hosts.before("d1", "sleep 600")
    (result,) = bench.copy("d1", answer_s=0.5)
    assert result.reason == "it has not answered within 0.5 s"
    wait(lambda: not living(str(bench.hosts.root)), "no process left")


def use_old_rsync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have an rsync found that knows few options."""
    old = tmp_path / "old" / "rsync"
    old.parent.mkdir()
    old.write_text(_OLD % shutil.which("rsync"))
    old.chmod(0o755)
    monkeypatch.setenv("PATH", "%s:%s" % (old.parent, os.environ["PATH"]))


def test_an_rsync_that_knows_few_options_is_enough(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As openrsync, or one of many years ago."""
    use_old_rsync(tmp_path, monkeypatch)
    assert bench.copy("d1", dst="a 'b'")[0].ok
    write(bench.source, **{"train.py": "newer"})
    (bench.source / "lib" / "a.py").unlink()
    assert bench.copy("d1", dst="a 'b'", delete=True)[0].ok
    assert bench.there("d1", "a 'b'") == {"train.py": "newer"}


def test_progress_is_said_while_it_goes(bench: Bench) -> None:
    bench.hosts.add("d1")
    gate = bench.hosts.root / "gate"
    bench.hosts.before("d1", "while [ ! -e '%s' ]; do sleep 0.05; done" % gate)
    copier = bench.copier("d1", report_s=0.05)
    got: queue.SimpleQueue[object] = queue.SimpleQueue()
    copier.start(got.put)
    wait(lambda: "sync 0/1: nothing was sent so far" in bench.sink.texts(), "a line")
    gate.touch()
    assert isinstance(got.get(timeout=scaled(LIMIT_S)), AllPrepared)


_SLOW = """#!/bin/sh
# An rsync that sends 1,000 bytes a second, at last all that there is.
case $1 in --version | --help) exec {rsync} "$1" ;; esac
echo "distrun-sync: begin" >&2
sent=0
until [ -e '{gate}' ]; do
    sent=$((sent + 1000))
    printf '%s  12%%  1.00kB/s    0:00:00  \\r' $sent
    sleep 1
done
printf '50000  12%%  1.00kB/s    0:00:00 (xfr#1, to-chk=0/2)\\r'
until [ -e '{end}' ]; do sleep 0.05; done
"""


def test_progress_has_percent_rate_and_the_time_that_is_left(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, end, program = (bench.hosts.root / name for name in ("gate", "end", "rsync"))
    program.write_text(_SLOW.format(rsync=shutil.which("rsync"), gate=gate, end=end))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", "%s:%s" % (program.parent, os.environ["PATH"]))
    tree = Tree(1, 50000, sums=([0, 0, 50000],))
    copier = bench.copier("d1", "d2", tree=tree, report_s=0.1)
    got: queue.SimpleQueue[object] = queue.SimpleQueue()
    copier.start(got.put)

    def said(pattern: str) -> bool:
        return any(re.fullmatch(pattern, text) for text in bench.sink.texts())

    wait(lambda: said(r"sync 0/2: 2%, 0 files, 2\.0 KiB sent"), "what is sent; both hosts count")
    wait(lambda: said(r"sync 0/2: \d+%, 0 files, .* sent, \d.*B/s, 0:\d\d:\d\d left"), "percent, rate, time left")
    gate.touch()
    wait(lambda: said(r"sync 0/2: 99%, 2 files, 97\.7 KiB sent, waiting for the hosts to finish"), "all is sent")
    end.touch()
    assert isinstance(got.get(timeout=scaled(LIMIT_S)), AllPrepared)


def test_where_rsync_does_not_say_how_far_it_is_no_rate_is_made_up(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_old_rsync(tmp_path, monkeypatch)
    bench.hosts.add("d1")
    gate = bench.hosts.root / "gate"
    bench.hosts.before("d1", "while [ ! -e '%s' ]; do sleep 0.05; done" % gate)
    got: queue.SimpleQueue[object] = queue.SimpleQueue()
    bench.copier("d1", report_s=0.05).start(got.put)
    wait(lambda: "sync 0/1: this rsync does not say how far it is" in bench.sink.texts(), "a line")
    gate.touch()
    assert isinstance(got.get(timeout=scaled(LIMIT_S)), AllPrepared)


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def test_several_failures_are_told_together() -> None:
    results = [CopyResult("a"), CopyResult("b", reason="r1", fix="f1", words=("w1",)), CopyResult("c", reason="r2")]
    assert first_failure(results) == ("b", "r1 (nor c)", "b: r1\n    w1\n    fix: f1\nc: r2")
    assert first_failure(results[:2]) == ("b", "r1", "w1\nfix: f1")
    assert first_failure([CopyResult("a")]) == ("", "", "")
    assert str(error([*results, CopyResult("d", cancelled=True)])).splitlines() == [
        "the files did not reach 2 of 4 hosts", "b: r1", "    w1", "    fix: f1", "c: r2", "not finished: d",
    ]  # fmt: skip
