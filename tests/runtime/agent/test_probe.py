from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import nvidia
import pytest

from distrun_runtime.agent import interpreters, probe, query


def test_the_probe_tells_json_able_facts(tmp_path: Path) -> None:
    facts = query.answer(
        "probe", {"python": sys.executable, "cwd": str(tmp_path), "dst": str(tmp_path / "a" / "b"), "interface": "lo"}
    )
    assert json.loads(json.dumps(facts)) == facts
    assert facts["python"]["version"] == "%d.%d.%d" % sys.version_info[:3]
    assert facts["python"]["numpy"]
    assert facts["folders"]["cwd"]["exists"]
    dst = facts["folders"]["dst"]
    assert (dst["exists"], dst["near"], dst["writable"]) == (False, str(tmp_path), True)
    assert facts["network"]["address"] in ("127.0.0.1", "::1")
    assert facts["user"]
    assert facts["limits"]["nofile"][0] is None or facts["limits"]["nofile"][0] > 0


def test_an_interface_that_is_not_there_is_told_not_raised() -> None:
    found = probe.network({"interface": "nosuch0"})
    assert "no interface 'nosuch0'" in found["error"]
    assert found["interfaces"]


def test_a_settled_address_is_not_looked_for() -> None:
    assert probe.network({"address": "192.0.2.1", "interface": "nosuch0"})["address"] == "192.0.2.1"


def test_a_program_that_hangs_or_is_not_there_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert query.answer("probe", {})["rsync"] == {"version": "", "error": "rsync: No such file or directory"}
    (tmp_path / "rsync").write_text("#!/bin/sh\nexec /bin/sleep 600\n")
    (tmp_path / "rsync").chmod(0o755)
    monkeypatch.setattr(probe, "PROGRAM_S", 0.1)
    assert query.answer("probe", {})["rsync"]["error"] == "rsync: did not answer within 0.1 s"
    assert "there is no program /no/such/python" in probe.python("/no/such/python")["error"]


def test_an_interpreter_may_be_named_below_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "py").symlink_to(sys.executable)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert probe.python("~/py")["version"]


def test_an_interpreter_that_is_none_is_told() -> None:
    assert "is not a working Python (exit code 1)" in probe.python("false")["error"]


def test_an_interpreter_is_looked_for_in_the_environment_that_the_activation_left(tmp_path: Path) -> None:
    (tmp_path / "mypython").symlink_to(sys.executable)
    asked = {"python": "mypython", "activate": "export PATH=$PWD:$PATH", "cwd": str(tmp_path)}
    facts = query.answer("probe", asked)
    assert facts["activation"] == {"error": ""}
    assert facts["python"]["path"].startswith(str(tmp_path))
    failed = query.answer("probe", {**asked, "activate": "echo no such thing >&2; false"})
    assert "no such thing" in failed["activation"]["error"]
    assert failed["python"] == failed["activation"]


def test_a_file_in_place_of_a_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert not probe.folder(str(tmp_path / "file" / "x"))["is_folder"]


def test_gpus_are_read_from_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia.smi(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path) + os.pathsep + os.environ["PATH"])
    monkeypatch.setenv("SMI_GPUS", "1")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    gpu = {"number": 0, "uuid": "GPU-0000", "name": "NVIDIA H100, 80GB", "memory": 81559 << 20, "instances": None}
    found = {"how": "smi", "driver": "550.54", "gpus": [gpu], "error": "", "visible": None}
    assert probe.gpus() == found
    assert probe.gpus({b"CUDA_VISIBLE_DEVICES": b"0"}) == {**found, "visible": "0"}
    monkeypatch.setenv("SMI_SAYS", "driver mismatch")
    assert probe.gpus() == {"how": "", "driver": "", "gpus": [], "error": "driver mismatch", "visible": None}


def test_what_others_may_write_is_told(tmp_path: Path) -> None:
    (tmp_path / ".ssh").mkdir(mode=0o700)
    keys = tmp_path / ".ssh" / "authorized_keys"
    keys.write_text("")
    keys.chmod(0o664)
    tmp_path.chmod(0o755)
    assert probe.loose(str(tmp_path)) == [str(keys)]


def test_an_interpreter_that_hangs_is_ended_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "PROGRAM_S", 0.3)
    (tmp_path / "py").write_text("#!/bin/sh\nsleep 600\n")
    (tmp_path / "py").chmod(0o755)
    assert "did not import numpy, zmq within 0.3 s" in probe.python(str(tmp_path / "py"))["error"]


def test_an_environment_for_the_interpreter_of_another_host_is_left_to_that_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    usual = Path(interpreters.place("3.11.2", "/usr/bin/python3"))
    for target, of_us in ((Path(sys.executable), True), (tmp_path / "a python of another host", False)):
        made = usual.with_name(usual.name + ".made-%s" % of_us)
        (made / "bin").mkdir(parents=True)
        made.chmod(0o755)
        (made / "bin" / "python").symlink_to(target)
        usual.unlink(missing_ok=True)
        usual.symlink_to(made.name)
        assert (interpreters.place("3.11.2", "/usr/bin/python3") == str(usual)) is of_us
    own = Path(interpreters.place("3.11.2", "/usr/bin/python3"))
    assert own != Path(interpreters.place("3.11.2", "/opt/bin/python3"))
    usual.parent.chmod(0o700)
    own.symlink_to("%s.made-True" % usual.name)
    found = list(interpreters.environments("3.11.2"))
    assert found == [str(each / "bin" / "python") for each in (own, usual)]
