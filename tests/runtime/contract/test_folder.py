"""The folder of a copy: nobody but the user and root may change what a job will run from it."""

from __future__ import annotations

import grp
import os
import pwd
import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest

from distrun_runtime.contract import folder, process
from distrun_runtime.contract.folder import FolderUnfit, prepare

MALLORY = 64321
"""A user id, and a group's, that nobody here has."""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")


@pytest.fixture(autouse=True)
def umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def refused(path: Path | str, **more: object) -> FolderUnfit:
    with pytest.raises(FolderUnfit) as caught:
        prepare(str(path), " on d2", **more)  # type: ignore[arg-type]
    assert caught.value.kind == "folder"
    return caught.value


def give(path: Path, gid: int = -1) -> Path:
    """Make a path another user's."""
    os.chown(path, MALLORY, gid, follow_symlinks=False)
    return path


def made(path: Path, mode: int = 0o755) -> Path:
    path.mkdir(parents=True)
    path.chmod(mode)
    return path


def test_missing_folders_are_made_and_can_be_written_by_the_user_only(tmp_path: Path) -> None:
    os.umask(0)
    place = prepare(str(tmp_path / "a" / "b"))
    assert place == (str(tmp_path / "a" / "b"), False, ())
    assert [oct(path.stat().st_mode & 0o777) for path in (tmp_path / "a", tmp_path / "a" / "b")] == ["0o755"] * 2


@needs_root
def test_a_folder_that_another_user_prepared_is_refused_by_name(tmp_path: Path) -> None:
    target = give(made(tmp_path / "job"))
    (target / "numpy.py").write_text("")
    refusal = refused(target)
    assert str(refusal) == "%s on d2 is owned by user %d, so others could change what the job runs" % (target, MALLORY)
    assert refusal.fix.startswith("give a directory of your own, such as --sync-dst-dir '~/job'")
    assert os.listdir(target) == ["numpy.py"]


@needs_root
def test_a_folder_below_one_that_another_user_has_is_refused_and_not_made(tmp_path: Path) -> None:
    theirs = give(made(tmp_path / "theirs", 0o777))
    refusal = refused(theirs / "a" / "job")
    assert str(refusal).startswith("%s on d2: %s is owned by user" % (theirs / "a" / "job", theirs))
    assert os.listdir(theirs) == []


@needs_root
@pytest.mark.parametrize("way", ["link/job", "link", "job/../link"])
def test_another_users_link_is_refused_wherever_it_leads(tmp_path: Path, way: str) -> None:
    made(tmp_path / "mine" / "job")
    made(tmp_path / "job")
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    give(tmp_path / "link")
    refusal = refused(tmp_path / way)
    assert "the link %s is owned by user" % (tmp_path / "link") in str(refusal) or str(refusal).startswith(
        "%s on d2 is owned by" % (tmp_path / "link")
    )
    assert os.listdir(tmp_path / "mine") == ["job"]


@needs_root
def test_a_link_of_ones_own_into_another_users_folder_is_refused(tmp_path: Path) -> None:
    theirs = give(made(tmp_path / "theirs"))
    (tmp_path / "link").symlink_to("theirs")
    assert "%s is owned by" % theirs in str(refused(tmp_path / "link" / "job"))


def test_links_of_ones_own_are_followed(tmp_path: Path) -> None:
    made(tmp_path / "mine" / "deep")
    (tmp_path / "link").symlink_to("mine/./deep//")
    (tmp_path / "mine" / "deep" / "up").symlink_to("../../mine")
    (tmp_path / "absolute").symlink_to(tmp_path / "link")
    assert prepare(str(tmp_path / "absolute" / "up" / "x")).path == str(tmp_path / "mine" / "x")


def test_links_in_a_circle_end(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    assert "Too many levels of symbolic links" in str(refused(tmp_path / "a" / "x"))


def test_a_folder_that_everyone_can_write_is_refused_with_what_to_type(tmp_path: Path) -> None:
    open_ = made(tmp_path / "open", 0o777)
    refusal = refused(open_ / "job")
    assert "%s is writable by everyone (mode 0777)" % open_ in str(refusal)
    assert refusal.fix.startswith("on that host: chmod go-w %s; or give a directory of your own" % open_)
    assert os.listdir(open_) == []
    assert "%s on d2 is writable by everyone" % open_ in str(refused(open_))


def test_below_a_sticky_folder_ones_own_is_safe_and_the_sticky_one_itself_is_not(tmp_path: Path) -> None:
    sticky = made(tmp_path / "tmp", 0o1777)
    assert prepare(str(sticky / "job")).path == str(sticky / "job")
    refusal = refused(sticky)
    assert "writable by everyone (mode 1777)" in str(refusal)
    assert "chmod" not in refusal.fix


@needs_root
def test_in_a_sticky_folder_another_user_may_have_been_quicker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The race: there is nothing, and between that and the making of it another user makes a folder or a link."""
    sticky = made(tmp_path / "tmp", 0o1777)
    mkdir = os.mkdir
    made(tmp_path / "theirs")

    def quicker(path: str, mode: int) -> None:
        mkdir(path, 0o755)
        give(Path(path))
        mkdir(path, mode)

    def quicker_with_a_link(path: str, mode: int) -> None:
        Path(path).symlink_to(tmp_path / "theirs")
        give(Path(path))
        mkdir(path, mode)

    for number, trick in enumerate((quicker, quicker_with_a_link)):
        monkeypatch.setattr(folder.os, "mkdir", trick)
        refusal = refused(sticky / str(number) / "job")
        monkeypatch.undo()
        assert "%s is owned by user" % (sticky / str(number)) in str(refusal)
    assert os.listdir(tmp_path / "theirs") == []


def test_where_somebody_else_makes_the_same_folder_for_the_same_user_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mkdir = os.mkdir

    def twice(path: str, mode: int) -> None:
        mkdir(path, mode)
        mkdir(path, mode)

    monkeypatch.setattr(folder.os, "mkdir", twice)
    assert prepare(str(tmp_path / "a" / "b")).path == str(tmp_path / "a" / "b")


@needs_root
def test_files_of_others_in_the_folder_are_named(tmp_path: Path) -> None:
    target = made(tmp_path / "job")
    (target / "mine.py").write_text("")
    give(made(target / "pkg" / "theirs"))
    (target / "numpy.py").write_text("")
    give(target / "numpy.py")
    (target / "open.py").write_text("")
    (target / "open.py").chmod(0o666)
    (target / "data").symlink_to("/")
    refusal = refused(target)
    assert str(refusal) == (
        "%s on d2 has files that others own or can change, and the job could run them: "
        "numpy.py (owned by user %d), open.py (writable by everyone (mode 0666)), pkg/theirs (owned by user %d)"
        % (target, MALLORY, MALLORY)
    )
    assert "remove them or make them yours" in refusal.fix
    for number in range(9):
        give(made(target / ("more%d" % number)))
    assert str(refused(target)).endswith(" and others")


def test_files_are_looked_at_for_a_limited_time_and_that_is_said(tmp_path: Path) -> None:
    for number in range(600):
        (tmp_path / str(number)).write_text("")
    notes: dict[str, None] = {}
    folder.own(str(tmp_path), "~/job", notes, limit_s=-1.0)
    assert list(notes) == ["~/job: only the nearest 256 files in it were checked for files of others"]
    notes.clear()
    folder.own(str(tmp_path), "~/job", notes)
    assert notes == {}


class Users:
    """The user and groups of the system, as a test wants them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, gid: int) -> None:
        self.uid, self.own, self.name = os.geteuid(), gid, "ann"
        self.members: list[str] = []
        self.mine: tuple[int, ...] = (gid,)
        monkeypatch.setattr(folder.pwd, "getpwuid", self._user)
        monkeypatch.setattr(folder.grp, "getgrgid", self._group)
        monkeypatch.setattr(folder.os, "getgroups", lambda: list(self.mine))
        monkeypatch.setattr(folder.os, "getegid", lambda: self.own)

    def _user(self, uid: int) -> SimpleNamespace:
        return SimpleNamespace(pw_name="ann", pw_gid=self.own)

    def _group(self, gid: int) -> SimpleNamespace:
        return SimpleNamespace(gr_name=self.name, gr_mem=self.members, gr_gid=gid)


@pytest.fixture
def users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Users:
    """A user with a private group; folders in `tmp_path` get that group."""
    gid = os.getegid() or MALLORY
    if os.geteuid() == 0:
        os.chown(tmp_path, -1, gid)
        tmp_path.chmod(0o2755)
    return Users(monkeypatch, gid)


def group_writable(path: Path) -> Path:
    path.mkdir()
    path.chmod(path.stat().st_mode | 0o020)
    return path


def test_folders_of_a_users_private_group_are_as_good_as_private(tmp_path: Path, users: Users) -> None:
    """Many systems give each user such a group and let it write: umask 002."""
    target = group_writable(group_writable(tmp_path / "home") / "job")
    (target / "file").write_text("")
    (target / "file").chmod(0o664)
    assert prepare(str(target)).notes == ()


@pytest.mark.parametrize("change", ["another name", "more members", "not the login group"])
def test_a_group_with_others_in_it_is_no_private_one(
    tmp_path: Path, users: Users, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    target = group_writable(tmp_path / "project") / "job"
    if change == "another name":
        users.name = "proj"
    elif change == "more members":
        users.members = ["bob", "ann"]
    else:
        monkeypatch.setattr(folder.pwd, "getpwuid", lambda uid: SimpleNamespace(pw_name="ann", pw_gid=users.own + 1))
    monkeypatch.setattr(folder.os, "geteuid", lambda: 0)
    if users.uid == 0:  # root trusts no group but its own
        refusal = refused(target)
        assert "%s is writable by the group %s (mode 2775)" % (target.parent, users.name) in str(refusal)
        assert not target.exists()
    monkeypatch.setattr(folder.os, "geteuid", lambda: users.uid or MALLORY)
    assert prepare(str(target)).notes == (
        "%s: the members of your group %s can change %s" % (target, users.name, target.parent),
    )
    users.mine = ()
    monkeypatch.setattr(folder.os, "getegid", lambda: -2)
    assert "is writable by the group" in str(refused(target)), "the user is none of its members"


def test_a_group_that_nobody_knows_is_no_private_one(
    tmp_path: Path, users: Users, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(number: int) -> NoReturn:
        raise KeyError(number)

    monkeypatch.setattr(folder.grp, "getgrgid", unknown)
    monkeypatch.setattr(folder.pwd, "getpwuid", unknown)
    users.mine = ()
    monkeypatch.setattr(folder.os, "getegid", lambda: -2)
    assert "is writable by the group %d" % users.own in str(refused(group_writable(tmp_path / "x")))


def test_what_an_access_list_lets_others_write_is_not_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = made(tmp_path / "shared")
    # Owner, user MALLORY, group, mask, others: tag, permissions, id.
    entries = [(0x01, 7, -1), (0x02, 7, MALLORY), (0x04, 5, -1), (0x10, 7, -1), (0x20, 5, -1)]
    packed = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *entry) for entry in entries)
    try:
        os.setxattr(shared, "system.posix_acl_access", packed)
    except (OSError, AttributeError):
        pytest.skip("this file system has no access lists")
    own = os.geteuid()
    if own == 0:
        assert "%s is writable by users in its access list" % shared in str(refused(shared / "job"))
    monkeypatch.setattr(folder.os, "geteuid", lambda: own or MALLORY)
    assert prepare(str(shared / "job")).notes == (
        "%s: an access list lets others change %s" % (shared / "job", shared),
    )


def test_names_of_users_and_groups_are_told() -> None:
    assert process.user_name() == pwd.getpwuid(os.geteuid()).pw_name
    assert folder._group(0) == grp.getgrgid(0).gr_name


def test_the_source_itself_is_known_under_another_name_and_gets_no_marker(tmp_path: Path) -> None:
    source = made(tmp_path / "source")
    (tmp_path / "link").symlink_to("source")
    place = prepare(str(tmp_path / "link"), source=folder.identity(str(source)), delete=True)
    assert place == (str(source), True, ())
    assert os.listdir(source) == []


def test_an_added_folder_gets_no_marker(tmp_path: Path) -> None:
    prepare(str(tmp_path / "job" / "extra"), marks=False)
    assert os.listdir(tmp_path / "job" / "extra") == []


@pytest.mark.parametrize(("text", "path"), [("~", "."), ("~/x y", "x y"), ("job", "job"), ("./~z", "~z"), ("a/", "a")])
def test_paths_begin_at_the_home_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, path: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert prepare(text).path == str((tmp_path / path).resolve())
