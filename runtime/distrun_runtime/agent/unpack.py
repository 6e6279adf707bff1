"""Puts the files of a job, which come over the agent's channel as a tar archive, into their folder on this host.

The first process there makes another one in it, the stage, named after this copy, and gets the files. All others
see the same folder: places of one host, containers and hosts that share a file system. So each folder gets them once.

Files wait in the stage until all have come. Then each is renamed to where it belongs, so a copy that fails before that
leaves the folder as it was. No link is followed on the way to a file, and nothing in the archive leads out of the
folder: it has folders, plain files, and links that stay in it. Anything else is refused.

Nothing here waits for long: `take` takes one piece, `proceed` works for a moment. No task runs yet.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
import tarfile
import time
from typing import Any, Dict, Iterable, Iterator, List, NamedTuple, Optional, Set, Tuple, Union

from distrun_runtime.agent.channel import Channel
from distrun_runtime.agent.preflight import prepare_folder
from distrun_runtime.contract import folder
from distrun_runtime.contract.agent_messages import Copied, CopyFailed, Copying, FolderFound
from distrun_runtime.contract.folder import MARKER, ON, PARTIAL, STAGE, STALE_S, FolderUnfit
from distrun_runtime.contract.plan import Plan

BLOCK = 512
NAME_LIMIT = 16 * 1024
"""Bytes of one name in the archive, or of a link's target."""
SLICE_S = 0.05
TOLD_S = 1.0
"""How often it is said how many files are in place."""
ROOM = "make room there, or leave files out with --sync-exclude"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_LONG = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)


class _ArchiveEntry(NamedTuple):
    """A folder, file or link of the archive. What a file holds is in the stage, under its number."""

    path: str
    kind: bytes
    mode: int
    mtime: float
    target: str
    number: str


class Archive:
    """Reads a tar archive that comes in pieces, and writes what its files hold into a folder, each under a number.

    Arguments:
        stage: descriptor of that folder.
        where: the folder that the archive is for, in messages.
        own: the first parts of names that it must not have.
    """

    def __init__(self, stage: int, where: str, own: Tuple[str, ...]) -> None:
        self.members: List[_ArchiveEntry] = []
        self.files = self.size = 0
        """Files and links, and their bytes."""
        self.kinds: Dict[str, bool] = {}
        """By path, folders above the members included: whether it is a folder."""
        self.is_whole = False
        """Its end has come."""
        self._stage = stage
        self._where = where
        self._own = own
        self._block = bytearray()
        self._left = self._padding = 0
        """Bytes of the present member that are still to come, and of those that fill it up."""
        self._file = -1
        self._text = bytearray()
        self._long: Dict[bytes, str] = {}
        """Name and target of the next member, where they are too long for its own block."""
        self._next = b""
        """Which of them is coming."""

    def feed(self, piece: bytes) -> None:
        """Add a piece.

        Raises:
            Unfit: this is no archive, or has what it must not have.
            OSError: a file cannot be written.
        """
        data = memoryview(piece)
        while data:
            if self._left:
                part = data[: self._left]
                if self._file >= 0:
                    part = part[: os.write(self._file, part)]
                else:
                    self._text += part
                self._left -= len(part)
                if not self._left:
                    self._end_body()
            elif self._padding:
                part = data[: self._padding]
                self._padding -= len(part)
            else:
                part = data[: BLOCK - len(self._block)]
                self._block += part
                if len(self._block) == BLOCK:
                    self._begin(bytes(self._block))
                    self._block.clear()
            data = data[len(part) :]

    def close(self) -> None:
        """Close what is open."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _begin(self, block: bytes) -> None:
        """Begin a member."""
        if not any(block):
            self.is_whole = not self._long
            return
        try:
            info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except (tarfile.TarError, ValueError) as err:
            raise _refused(f"what came is no archive: {err}") from None
        if self.is_whole or info.size < 0:
            raise _refused("what came is no archive: it goes on after its end")
        self._left, self._padding = info.size, -info.size % BLOCK
        if info.type in _LONG:
            if not 0 < info.size <= NAME_LIMIT:
                raise _refused(f"the archive has a name of {info.size} bytes")
            self._next = info.type
            return
        path, target = self._long.pop(_LONG[0], info.name), self._long.pop(_LONG[1], info.linkname)
        is_file = info.type in (tarfile.REGTYPE, tarfile.AREGTYPE)
        if not (is_file or ((info.isdir() or info.issym()) and not info.size)):
            raise _refused(f"{path!r} is neither a file nor a folder nor a link")
        self._check(path, info.isdir())
        if info.issym() and folder.leads_out(path, target):
            raise _refused(f"the link {path!r} leads out of {self._where}, to {target!r}")
        member = _ArchiveEntry(path, info.type, info.mode & 0o777, info.mtime, target, str(len(self.members)))
        self.members.append(member)
        self.files += not info.isdir()
        if is_file:
            self._file = os.open(member.number, _NEW, 0o600, dir_fd=self._stage)
            self.size += info.size
            if not info.size:
                self._end_body()

    def _end_body(self) -> None:
        if self._file < 0:
            text = bytes(self._text).partition(b"\0")[0].decode("utf-8", "surrogateescape")
            self._long[self._next] = text.rstrip("/") if self._next == _LONG[0] else text
            self._text.clear()
        self.close()

    def _check(self, path: str, is_folder: bool) -> None:
        """Refuse a path that is not below the folder, is there already, or is below something that is no folder."""
        parts = path.split("/")
        if any(part in ("", ".", "..") for part in parts):
            raise _refused(f"{path!r} would not be in {self._where}")
        if parts[0] in self._own:
            raise _refused(f"{path!r} is distrun's own")
        above = ""
        for part in parts[:-1]:
            above += part
            if not self.kinds.setdefault(above, True):
                raise _refused(f"{path!r} is below {above!r}, which is no folder")
            above += "/"
        if path in self.kinds and not (is_folder and self.kinds[path]):
            raise _refused(f"{path!r} is there twice")
        self.kinds[path] = is_folder


class Unpacking:
    """One copy into `plan.cwd`.

    Arguments:
        on: put behind the folder in messages (` on h1`).
        run, rules: of the `copy` frame that asks for it.
        channel: sends messages.
    """

    def __init__(self, plan: Plan, on: str, run: str, rules: Iterable[Any], channel: Channel) -> None:
        self._plan = plan
        self._on = on
        self._channel = channel
        self._run = run
        self._delete = plan.sync is not None and plan.sync.delete
        self._rules = [(re.compile(text, re.DOTALL), bool(only), bool(keeps)) for text, only, keeps in rules]
        self._stage = PARTIAL + self._run + STAGE
        self._path = ""
        self._top = self._in_stage = -1
        """Descriptors of the folder and its stage, while files are awaited."""
        self._archive: Optional[Archive] = None
        self._placing: Optional[Iterator[str]] = None
        self._at = ""
        """What is put into place."""
        self._made: Set[str] = set()
        """Folders that were not there."""
        self._near: Tuple[str, int] = ("", -1)
        """A folder that is open, by its path."""
        self._count = 0
        self._tell_at = 0.0

    @property
    def is_placing(self) -> bool:
        """Whether `proceed` has something to do."""
        return self._placing is not None

    def begin(self) -> None:
        """Look at the folder, and say whether the files are wanted."""
        sync = self._plan.sync
        try:
            if sync is None:
                raise FolderUnfit("protocol", "the plan has no files to copy", "")
            found = prepare_folder(self._plan, sync, self._on, PARTIAL + self._run + ON)
            self._path = found.path
            state = "source" if found.is_source else "mine" if self._claim() else "shared"
        except (FolderUnfit, OSError) as err:
            self._fail(err)
        else:
            self._channel.say(FolderFound, state=state, notes=tuple(found.notes))

    def take(self, run: str, piece: bytes, is_last: bool, fault: str) -> bool:
        """Take a piece of the archive; return False if it is none of this copy. After a failure it is dropped.

        `fault`: why there will be no further pieces although they are missing.
        """
        archive = self._archive
        if run != self._run or archive is None or self._placing is not None:
            return run == self._run
        try:
            archive.feed(piece)
            if fault:
                raise FolderUnfit("other", f"the files were not sent whole: {fault}", "")
            if is_last and not archive.is_whole:
                raise _refused("the archive ends too early")
        except (FolderUnfit, OSError) as err:
            self._fail(err, archive.members[-1].path if archive.members else "")
        else:
            if is_last:
                self._placing, self._tell_at = self._place(archive), time.monotonic() + TOLD_S
        return True

    def proceed(self) -> None:
        """Put files into place for a moment; at the end say `copied`."""
        archive, placing = self._archive, self._placing
        if archive is None or placing is None:
            return
        until = time.monotonic() + SLICE_S
        try:
            for self._at in placing:
                now = time.monotonic()
                if now >= self._tell_at:
                    self._tell_at = now + TOLD_S
                    self._channel.say(Copying, files=self._count)
                if now >= until:
                    return
        except (FolderUnfit, OSError) as err:
            self._fail(err, self._at)
        else:
            self.close()
            self._channel.say(Copied, files=archive.files, bytes=archive.size)

    def close(self) -> None:
        """Remove what has come and is not in place. May be repeated."""
        if self._archive is not None:
            self._archive.close()
        for descriptor in (self._near[1], self._in_stage, self._top):
            if descriptor >= 0:
                os.close(descriptor)
        if self._in_stage >= 0:
            shutil.rmtree(os.path.join(self._path, self._stage), ignore_errors=True)
        self._archive = self._placing = None
        self._near, self._in_stage, self._top = ("", -1), -1, -1

    def _fail(self, err: Union[FolderUnfit, OSError], name: str = "") -> None:
        """Give up, and say why. `name`: of the file or folder of which the system reports an error."""
        self.close()
        if isinstance(err, OSError):
            where = os.path.join(self._path or self._plan.cwd, *filter(None, (name,))) + self._on
            is_full = err.errno in (errno.ENOSPC, errno.EDQUOT)
            what = "there is no room for the files" if is_full else "the files cannot be written"
            text = f"{what}: {where}: {err.strerror or err}"
            err = FolderUnfit("disk" if is_full else "folder", text, ROOM if is_full else "")
        self._channel.say(CopyFailed, reason=str(err), kind=err.kind, fix=err.fix)

    def _claim(self) -> bool:
        """Make the stage; return False if another agent has made it. Old ones of killed agents are removed."""
        for name in os.listdir(self._path):
            if name.startswith(PARTIAL) and name.endswith(STAGE):
                old = os.path.join(self._path, name)
                with contextlib.suppress(OSError):
                    if os.lstat(old).st_mtime < time.time() - STALE_S:
                        shutil.rmtree(old)
        try:
            os.mkdir(os.path.join(self._path, self._stage), 0o700)
        except FileExistsError:
            return False
        self._top = os.open(self._path, _FOLDER)
        self._in_stage = os.open(self._stage, _FOLDER, dir_fd=self._top)
        self._archive = Archive(self._in_stage, self._path, (MARKER, self._stage))
        return True

    # From the stage to where they belong

    def _place(self, archive: Archive) -> Iterator[str]:
        """Put one member after the other into place, then delete; yield the path that is next."""
        umask = os.umask(0o077)
        os.umask(umask)
        for member in archive.members:
            yield member.path
            above, _, name = member.path.rpartition("/")
            parent = self._open(above)
            if member.kind == tarfile.DIRTYPE:
                os.close(self._enter(parent, name, member.path))
                continue
            there = _look(parent, name)
            if there is not None and stat.S_ISDIR(there.st_mode):
                self._give_way(parent, name, member)
            if member.kind == tarfile.SYMTYPE:
                fresh = self._stage + "-link"
                os.symlink(member.target, fresh, dir_fd=parent)
                os.rename(fresh, name, src_dir_fd=parent, dst_dir_fd=parent)
            else:
                mode = member.mode & ~umask
                if there is not None and stat.S_ISREG(there.st_mode):
                    mode = _as_executable(stat.S_IMODE(there.st_mode), member.mode)
                self._rename(member, parent, name, mode)
            self._count += 1
        for member in reversed(archive.members):
            if member.path in self._made:
                yield member.path
                above, _, name = member.path.rpartition("/")
                parent = self._open(above)
                special = os.stat(name, dir_fd=parent).st_mode & 0o7000  # inherited
                os.chmod(name, special | (member.mode & ~umask), dir_fd=parent)
        if self._delete:
            yield from self._clean(self._top, "", archive.kinds)

    def _open(self, path: str) -> int:
        """Return the descriptor of a folder below ours, until the next call. It is made where it is missing."""
        if self._near[1] < 0 or self._near[0] != path:
            at, descriptor = "", os.dup(self._top)
            try:
                for name in path.split("/") if path else ():
                    at = at + "/" + name if at else name
                    inner = self._enter(descriptor, name, at)
                    os.close(descriptor)
                    descriptor = inner
            except BaseException:
                os.close(descriptor)
                raise
            if self._near[1] >= 0:
                os.close(self._near[1])
            self._near = (path, descriptor)
        return self._near[1]

    def _enter(self, parent: int, name: str, path: str) -> int:
        """Open a folder, which is made where there is none; a file or link in its place goes."""
        try:
            return os.open(name, _FOLDER, dir_fd=parent)
        except FileNotFoundError:
            pass
        except OSError as err:
            if err.errno not in (errno.ENOTDIR, errno.ELOOP):
                raise
            os.unlink(name, dir_fd=parent)
        with contextlib.suppress(FileExistsError):  # another copy was quicker
            os.mkdir(name, 0o777, dir_fd=parent)
            self._made.add(path)
        return os.open(name, _FOLDER, dir_fd=parent)

    def _give_way(self, parent: int, name: str, member: _ArchiveEntry) -> None:
        """Take a folder away where a file or link belongs, if it is empty or files are to be deleted."""
        if self._delete:
            os.rename(name, member.number + "-old", src_dir_fd=parent, dst_dir_fd=self._in_stage)
            return
        try:
            os.rmdir(name, dir_fd=parent)
        except OSError as err:
            where = os.path.join(self._path, member.path) + self._on
            raise FolderUnfit(
                "folder", f"{where} is a folder ({err.strerror}), and here it is a file", "remove it there"
            ) from None

    def _rename(self, member: _ArchiveEntry, parent: int, name: str, mode: int) -> None:
        """Put a file into place, with mode and time; a mounted file system below the folder gets a copy."""
        number, times = member.number, (time.time(), member.mtime)
        os.chmod(number, mode, dir_fd=self._in_stage)
        os.utime(number, times, dir_fd=self._in_stage)
        try:
            os.rename(number, name, src_dir_fd=self._in_stage, dst_dir_fd=parent)
        except OSError as err:
            if err.errno != errno.EXDEV:
                raise
            fresh = self._stage + "-file"
            with contextlib.ExitStack() as stack:
                source = stack.enter_context(open(os.open(number, os.O_RDONLY, dir_fd=self._in_stage), "rb"))
                target = stack.enter_context(open(os.open(fresh, _NEW, 0o600, dir_fd=parent), "wb"))
                shutil.copyfileobj(source, target)
            os.chmod(fresh, mode, dir_fd=parent)
            os.utime(fresh, times, dir_fd=parent)
            os.rename(fresh, name, src_dir_fd=parent, dst_dir_fd=parent)
            os.unlink(number, dir_fd=self._in_stage)

    # What only this host has

    def _clean(self, descriptor: int, above: str, kinds: Dict[str, bool]) -> Iterator[str]:
        """Delete what is in a folder and not in the archive, unless a rule keeps it; yield the path that is next."""
        for name in os.listdir(descriptor):
            path = above + name
            info = _look(descriptor, name)
            if info is None or path == MARKER or name.startswith(PARTIAL):
                continue
            is_folder = stat.S_ISDIR(info.st_mode)
            if self._is_kept(path, is_folder):
                continue
            yield path
            # Another copy may delete here, too.
            with contextlib.suppress(FileNotFoundError):
                if is_folder:
                    inner = os.open(name, _FOLDER, dir_fd=descriptor)
                    try:
                        yield from self._clean(inner, path + "/", kinds)
                    finally:
                        os.close(inner)
                    if path not in kinds:
                        with contextlib.suppress(OSError):  # something in it is kept
                            os.rmdir(name, dir_fd=descriptor)
                elif path not in kinds:
                    os.unlink(name, dir_fd=descriptor)

    def _is_kept(self, path: str, is_folder: bool) -> bool:
        """Return what the first rule says that fits. Rules see bytes, as rsync does."""
        seen = "/" + os.fsencode(path).decode("latin-1")
        for pattern, only_folders, keeps in self._rules:
            if (is_folder or not only_folders) and pattern.fullmatch(seen):
                return keeps
        return False


def _refused(text: str) -> FolderUnfit:
    return FolderUnfit("protocol", text, "")


def _look(parent: int, name: str) -> Optional[os.stat_result]:
    try:
        return os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _as_executable(mode: int, like: int) -> int:
    """Return a mode that can be executed, by those who can read, if `like` can be executed; else one that cannot."""
    if bool(mode & 0o111) == bool(like & 0o111):
        return mode
    return mode | (mode & 0o444) >> 2 if like & 0o111 else mode & ~0o111
