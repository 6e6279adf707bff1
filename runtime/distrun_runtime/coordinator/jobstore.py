"""The job store: one folder a job, found by id, by the beginning of an id, or by name.

It is `$XDG_STATE_HOME/distrun/jobs/ID` (`~/.local/state` where that is unset); with --run-dir the folder is
DIR/ID and a link to it is in its place. What a folder holds is `jobfolder`.
"""

from __future__ import annotations

import os
import random
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, List, Mapping, Optional

from distrun_runtime.contract import environ, facts
from distrun_runtime.coordinator.jobfolder import JobFolder
from distrun_runtime.errors import JobStoreError, NoSuchJob

if TYPE_CHECKING:
    from distrun_runtime.contract.plan import Plan

# Ids of jobs: short, pronounceable, unique in a store, e.g. `calm-otter-7f3`, or `digits-7f3` for a named job.


_FIRST = (
    "able amber apt blue bold brave brief bright brisk calm clean clear clever cool crisp deep eager early "
    "even fair fast fine firm fond free fresh full gentle glad gold good grand green happy keen kind lean "
    "light live loud lucky merry mild neat new nice noble open pale plain prime proud pure quick quiet rare "
    "ready red rich ripe round safe sharp shy silver slim smart smooth soft solid spry still strong sunny sure "
    "sweet swift tall tame tidy true vast warm wide wild wise young"
)
_SECOND = (
    "ant ape auk bat bear bee bird boar bream buck bull calf camel carp cat clam cod colt coot crab crane crow "
    "cub deer dog dove duck eagle eel elk emu ewe falcon fawn finch fish fox frog gnu goat goose grebe gull "
    "hare hawk hen heron horse ibex ibis jay kid kite koala lamb lark lemur lion llama loon lynx mink mole "
    "moose moth mouse mule newt ocelot okapi orca oryx otter owl ox panda perch pig pike pony puffin puma "
    "quail rabbit ram rat raven robin rook salmon seal shark sheep shrew shrimp skua sloth snail snipe sparrow "
    "squid stag stork swan swift tapir teal tern tiger toad trout turtle viper vole wasp weasel whale wolf "
    "wombat wren yak zebra"
)

_NOT_PLAIN = r"[^A-Za-z0-9._]+"
_TRIES = 200
_NAME_LIMIT = 40


_SHOWN = 5


class JobStore:
    """All jobs of this user. `root` is `environ.state_folder()` unless given; nothing is made before `create`."""

    def __init__(self, root: Optional[Path] = None) -> None:
        self.root = Path(root) if root is not None else Path(environ.state_folder())
        self.jobs = self.root / "jobs"

    def new_id(self, name: str = "", chance: Optional[random.Random] = None) -> str:
        """Return an id that no job of the store has: `calm-otter-7f3`, or `NAME-7f3`.

        It is also a legal file name, and begins with a letter or digit.

        Arguments:
            name: what the user calls the job; what no file name should hold becomes a hyphen.
            chance: source of randomness; the system's when absent (two launchers never draw alike).

        Raises:
            JobStoreError: the store is full of such ids.
        """
        chance = chance or random.SystemRandom()
        stem = re.sub(_NOT_PLAIN, "-", name).strip("-._")[:_NAME_LIMIT].rstrip("-._")
        for _ in range(_TRIES):
            front = stem or f"{chance.choice(_FIRST.split())}-{chance.choice(_SECOND.split())}"
            wanted = f"{front}-{chance.randrange(16**3):03x}"
            if not os.path.lexists(str(self.jobs / wanted)):
                return wanted
        raise JobStoreError("no free job id of the form %s-xxx; choose another --name" % (stem or "word-word"))

    def create(
        self,
        plan: Plan,
        run_dir: Optional[Path] = None,
        request: Optional[Mapping[str, Any]] = None,
        allocation: Optional[Mapping[str, Any]] = None,
    ) -> JobFolder:
        """Make the folder of `plan.job`, state starting, this process as its launcher.

        `request`, `allocation`: what its files hold, JSON-able and without secrets.

        Raises:
            JobStoreError: it exists already, or cannot be made or written.
        """
        return self._make(plan.job, run_dir, lambda place: JobFolder.make(place, plan, request, allocation))

    def take_over(self, plan: Plan) -> Optional[JobFolder]:
        """Return the folder of `plan.job`, this process as its launcher, if it was made for this very plan, else None.

        A launcher that shares this store has made it. It is recognized by the nonce of the plan in it.

        Raises:
            JobStoreError: it cannot be written.
        """
        entry = self.jobs / plan.job
        folder = JobFolder(Path(os.readlink(str(entry))) if entry.is_symlink() else entry)
        try:
            if not plan.nonce or folder.plan().nonce != plan.nonce:
                return None
            folder.take_over()
            folder.start(plan)
        except JobStoreError:
            return None
        except OSError as err:
            raise _cannot_make(folder.path, err, None) from err
        return folder

    def submit(self, job: str, request: Mapping[str, Any], run_dir: Optional[Path] = None) -> JobFolder:
        """Make the folder of a job that waits for its allocation, state submitting, this process as its launcher.

        `JobFolder.allocate` and `start` follow. Raises JobStoreError as `create` does.
        """
        return self._make(job, run_dir, lambda place: JobFolder.submit(place, request))

    def _make(self, job: str, run_dir: Optional[Path], fill: Callable[[Path], JobFolder]) -> JobFolder:
        """Claim an id and fill the job's folder.

        Of several hosts that share the store, one gets the id: making a folder or a link either works or says that it
        is there, on NFS too.
        """
        entry = self.jobs / job
        place = entry if run_dir is None else Path(os.path.abspath(str(run_dir))) / job
        try:
            self.jobs.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as err:
            raise _cannot_make(self.jobs, err, None) from err
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
        except OSError as err:
            raise _cannot_make(place, err, run_dir) from err
        made: List[Path] = []
        try:
            if entry != place and not _is_link_to(entry, place):
                entry.symlink_to(place, target_is_directory=True)
                made.append(entry)
            place.mkdir(mode=0o700)
            made.append(place)
            return fill(place)
        except OSError as err:
            _unmake(made)
            if isinstance(err, FileExistsError) and place not in made:
                raise JobStoreError(f"there is a job {job} already: {place}") from err
            raise _cannot_make(place, err, run_dir) from err

    def list(self) -> List[JobFolder]:
        """Return all jobs, newest first, damaged ones too. A folder that is being made is left out."""
        try:
            names = os.listdir(str(self.jobs))
        except OSError:
            return []
        folders = [JobFolder(self.jobs / name) for name in names if not name.startswith(".")]
        found = [(folder.created(), folder.id, folder) for folder in folders if folder.exists()]
        return [folder for _, _, folder in sorted(found, key=lambda row: row[:2], reverse=True)]

    def find(self, wanted: str) -> JobFolder:
        """Return the job with that id, or the newest of that exact name, or the only one whose id begins so.

        Raises:
            NoSuchJob: there is none, or several begin so; the message lists them, or near ones, or the newest.
        """
        found = self._matches(wanted)
        return found[0] if found[0].name() == wanted else _only(found, wanted)

    def find_living(self, wanted: str) -> JobFolder:
        """Return what `find` would, where jobs that run, then lost and damaged ones, come before those that are over.

        Raises:
            NoSuchJob: there is none; or several of the same standing, and not all of them are over.
        """
        found = self._matches(wanted)
        states = [job.standing() for job in found]
        for standing in (facts.GOING, (facts.LOST, facts.DAMAGED)):
            chosen = [job for job, state in zip(found, states) if state in standing]
            if chosen:
                return _only(chosen, wanted)
        return found[0] if found[0].name() == wanted else _only(found, wanted)

    def named(self, name: str) -> List[JobFolder]:
        """Return the jobs with exactly that name, newest first."""
        return [job for job in self.list() if name and job.name() == name]

    def _matches(self, wanted: str) -> List[JobFolder]:
        """Return what a word of the user may mean, newest first: by id, else by exact name, else by prefix."""
        jobs = self.list()
        found = [job for job in jobs if job.id == wanted]
        found = found or [job for job in jobs if wanted and job.name() == wanted]
        found = found or [job for job in jobs if wanted and job.id.startswith(wanted)]
        if found:
            return found
        known = [job.id for job in jobs]
        import difflib  # for a mistake only

        near = difflib.get_close_matches(wanted, known + [job.name() for job in jobs if job.name()], _SHOWN, 0.6)
        if near:
            hint = f"near: {facts.listed(list(dict.fromkeys(near)), _SHOWN)}"
        elif known:
            hint = f"{'there are' if len(known) <= _SHOWN else 'the newest'}: {facts.listed(known, _SHOWN)}"
        else:
            hint = f"there are no jobs in {self.jobs}"
        raise NoSuchJob(f"no job {wanted!r}; {hint}")


def _only(found: List[JobFolder], wanted: str) -> JobFolder:
    if len(found) > 1:
        raise NoSuchJob(f"{wanted!r} could be {facts.listed([job.id for job in found], _SHOWN)}; type more of the id")
    return found[0]


def _is_link_to(entry: Path, place: Path) -> bool:
    """Whether a job's link is there and its folder is not: it is on a disk of the launcher, which shares the store."""
    return entry.is_symlink() and os.readlink(str(entry)) == str(place) and not place.exists()


def _unmake(made: List[Path]) -> None:
    import shutil  # for a failure only

    for path in reversed(made):
        if path.is_symlink():
            path.unlink()
        else:
            shutil.rmtree(str(path), ignore_errors=True)


def _cannot_make(place: Path, err: OSError, run_dir: Optional[Path]) -> JobStoreError:
    what = "--run-dir" if run_dir is not None else "XDG_STATE_HOME"
    why = f"cannot make the job's folder {place}: {err.strerror or err}"
    return JobStoreError(f"{why}; set {what} to a place that can be written")
