"""The private folder and the record."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from distrun_runtime.agent import share
from distrun_runtime.agent.share import Record, RecordedTask
from distrun_runtime.contract import private, process
from distrun_runtime.contract.process import Identity
from distrun_runtime.errors import ContractError

GONE = Identity(2**22 + 5, "proc:x:1")


@pytest.fixture(autouse=True)
def runtime_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def example(agent: Identity = GONE, host: str = "d1") -> Record:
    return Record("j1", host, GONE, agent, 5.0, (RecordedTask("worker-0", Identity(5, "s")),), (Identity(6, "t"),))


def test_folder_is_private_and_holds_the_token(runtime_dir: Path) -> None:
    folder = share.make_folder("j1", "d1", "feedface")
    assert folder == str(runtime_dir / "distrun" / "j1" / "d1")
    for path in (runtime_dir / "distrun", Path(folder).parent, Path(folder), Path(folder, "spool")):
        assert path.stat().st_mode & 0o777 == 0o700
    token = Path(folder, "token")
    assert token.read_text() == "feedface"
    assert token.stat().st_mode & 0o777 == 0o600
    assert share.folders_of("j1") == [folder]
    share.remove_folder(folder)
    assert share.folders_of("j1") == []
    assert list((runtime_dir / "distrun").iterdir()) == []


def test_two_hosts_of_a_job_on_one_machine_have_folders_of_their_own() -> None:
    first, second = share.make_folder("j1", "d1", ""), share.make_folder("j1", "d2", "")
    share.remove_folder(first)
    assert share.folders_of("j1") == [second]
    assert not os.path.exists(os.path.join(second, "token"))


def test_record_comes_back() -> None:
    folder = share.make_folder("j1", "d1", "t")
    share.save_record(folder, example())
    assert share.load_record(folder) == example()
    assert Path(folder, "agent.json").stat().st_mode & 0o777 == 0o600
    assert sorted(os.listdir(folder)) == ["agent.json", "spool", "token"]


def test_record_of_another_version_is_refused() -> None:
    folder = share.make_folder("j1", "d1", "t")
    share.save_record(folder, example())
    value = json.loads(Path(folder, share.RECORD).read_text())
    for broken in (dict(value, version=9), {}, [], dict(value, tasks=[1])):
        Path(folder, share.RECORD).write_text(json.dumps(broken))
        with pytest.raises(ContractError, match="this is not an agent record"):
            share.load_record(folder)


def test_link_in_place_of_the_root_is_not_followed(runtime_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (runtime_dir / "distrun").symlink_to(elsewhere)
    folder = share.make_folder("j1", "d1", "")
    try:
        assert not folder.startswith(str(runtime_dir))
        assert list(elsewhere.iterdir()) == []
    finally:
        share.remove_folder(folder)


def test_root_that_others_can_read_is_closed(runtime_dir: Path) -> None:
    (runtime_dir / "distrun").mkdir(mode=0o755)
    share.make_folder("j1", "d1", "")
    assert (runtime_dir / "distrun").stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_a_folder_that_another_user_made_first_keeps_nobody_from_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = {name: tmp_path / name / "distrun-0" for name in ("tmp", "var")}
    for each in taken.values():
        each.parent.mkdir(mode=0o1777)
        each.mkdir(mode=0o700)
        os.chown(each, 4711, 4711)
    monkeypatch.setattr(share, "roots", lambda: [str(taken["tmp"])])
    monkeypatch.setattr(private, "lasting_root", lambda: str(taken["var"]))
    found = [share.make_folder("j1", host, "", lasts=lasts) for host, lasts in (("a", False), ("b", True), ("c", True))]
    roots = [Path(folder).parents[1] for folder in found]
    assert [root.parent.name for root in roots] == ["tmp", "var", "var"]
    assert roots[1] == roots[2]
    assert all(root.name.startswith("distrun-0-") and root.stat().st_mode & 0o7777 == 0o700 for root in roots)
    assert share.folders_of("j1") == found
    kept = [folder for folder in share.all_folders() if folder in found]  # other jobs may run here
    assert sorted(kept) == sorted(found)


def test_no_usable_root_names_each_reason(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocker = runtime_dir / "file"
    blocker.write_text("")
    monkeypatch.setattr(share, "roots", lambda: [str(blocker), str(runtime_dir / "no" / "such")])
    with pytest.raises(ContractError, match=r"is not a folder .*No such file"):
        share.make_folder("j1", "d1", "")


def test_living_agent_of_the_same_job_and_host_is_not_pushed_aside() -> None:
    folder = share.make_folder("j1", "d1", "")
    share.save_record(folder, example(agent=process.identity(os.getpid())))
    with pytest.raises(ContractError, match="already has an agent for host d1"):
        share.make_folder("j1", "d1", "")
    share.make_folder("j1", "d2", "")
    share.save_record(folder, example(agent=GONE))
    assert share.make_folder("j1", "d1", "") == folder


@pytest.mark.parametrize(
    ("name", "safe"),
    [("d1", "d1"), ("../x", "_.._x"), ("", "_"), ("a/b c", "a_b_c"), ("fd00::1", "fd00::1"), ("é", "_")],
)
def test_names_become_one_component_of_a_path(name: str, safe: str) -> None:
    assert share.safe_name(name) == safe


@pytest.mark.parametrize("text", ["[" * 100_000 + "]" * 100_000, '{"version": 1, "grace_s": 1e999}', "[]", "1", "{"])
def test_a_record_that_is_none_is_said_to_be_none(text: str, tmp_path: Path) -> None:
    (tmp_path / share.RECORD).write_text(text)
    with pytest.raises(ContractError):
        share.load_record(str(tmp_path))
