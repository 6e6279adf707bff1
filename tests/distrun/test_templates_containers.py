"""The templates `dockerfile` and `compose`: read by hadolint and by Compose's rules, and built where Docker runs."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from compose_spec import PyCompose
from slowness import scaled

from distrun import __version__, templates

ROOT = Path(__file__).resolve().parents[2]
HADOLINT = Path(sys.executable).with_name("hadolint")
HARD = """torch>=2 a'b"c $HOME `id` ; <<EOF # é"""


def rendered(name: str, *values: str) -> str:
    return templates.render(templates.find(name), values)


def compose(*values: str) -> dict[str, Any]:
    """Return the file as Compose would see it: its schema holds, and what `$$` stands for is in place."""
    text = rendered("compose", *values)
    assert not re.search(r"(?<!\$)(\$\$)*\$(?!\$)", text.partition("\n")[2]), "a `$` that Compose would replace"
    found = yaml.safe_load(text)
    PyCompose.from_json(json.dumps(found))
    return json.loads(json.dumps(found).replace("$$", "$"))


@pytest.mark.skipif(not HADOLINT.exists(), reason="hadolint has no program for this machine")
@pytest.mark.parametrize("values", [(), ("base=python:3.11-slim-bookworm", "packages=torch numpy==2.1")])
def test_hadolint_has_nothing_to_say(values: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "Dockerfile"
    file.write_text(rendered("dockerfile", *values))
    done = subprocess.run([str(HADOLINT), str(file)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def instructions(text: str) -> list[str]:
    """Return the instructions of a Dockerfile, one line each."""
    bare = "".join(line for line in text.splitlines(keepends=True) if not line.startswith("#"))
    return [line for line in bare.replace("\\\n", " ").splitlines() if line]


def test_every_image_ends_as_a_user_who_is_not_root() -> None:
    stages: dict[str, str] = {}
    name = parent = ""
    for line in instructions(rendered("dockerfile")):
        word, _, rest = line.partition(" ")
        if word == "FROM":
            parent, _, name = rest.partition(" AS ")
            stages[name] = stages.get(parent, "0")
        elif word == "USER":
            stages[name] = rest
    assert stages.pop("build") == "0"
    assert stages == dict.fromkeys(("distrun", "host", "kubernetes", ""), "1000:1000")


def test_packages_stay_words_of_pip_whatever_they_contain() -> None:
    (plain,) = (line for line in instructions(rendered("dockerfile")) if "pip install" in line)
    (hard,) = (line for line in instructions(rendered("dockerfile", f"packages={HARD}")) if "pip install" in line)
    assert shlex.split(hard) == [*shlex.split(plain), *HARD.split()]
    assert len(instructions(rendered("dockerfile", f"packages={HARD}"))) == len(instructions(rendered("dockerfile")))


def test_compose_has_a_launcher_and_three_hosts_that_it_waits_for() -> None:
    found = compose()
    services = found["services"]
    assert list(services) == ["h1", "h2", "h3", "launcher"]
    assert services["launcher"]["depends_on"] == {host: {"condition": "service_healthy"} for host in ("h1", "h2", "h3")}
    assert services["launcher"]["environment"]["HOSTS"].split() == ["h1", "h2", "h3"]
    volumes = {each.partition(":")[0] for one in services.values() for each in one["volumes"] if isinstance(each, str)}
    assert volumes == set(found["volumes"])
    # Nothing is reached from outside, and nothing has more rights than a program of the user.
    assert not {"ports", "privileged", "cap_add", "network_mode", "pid"} & {
        key for one in services.values() for key in one
    }


def test_compose_builds_targets_that_the_dockerfile_has() -> None:
    targets = {one["build"].get("target", "") for one in compose()["services"].values() if "build" in one}
    text = rendered("dockerfile")
    assert targets == {"", "host"}
    assert re.search(r"^FROM \S+ AS host$", text, re.MULTILINE)


def test_each_image_of_compose_is_built_by_one_service_and_never_pulled() -> None:
    """Docker builds services at the same time: the second build of a name fails because the image already exists."""
    services = compose()["services"].values()
    built = [one["image"] for one in services if "build" in one]
    assert sorted(built) == sorted({one["image"] for one in services})
    assert {one.get("pull_policy") for one in services if "build" not in one} == {"never"}


def test_private_keys_never_are_where_another_container_sees_them() -> None:
    services = compose()["services"]
    for name, one in services.items():
        shared = {each for each in one["volumes"] if isinstance(each, str)}
        assert shared == ({"keys:/keys", "home:/srv/train"} if name == "launcher" else {"keys:/keys"})
        script = "\n".join(map(str, one.get("command", []) + one.get("entrypoint", [])))
        copied = re.findall(r'^ *cp (\S+) "\$KEYS/', script, re.MULTILINE)
        assert copied
        assert all(path.strip('"').endswith(".pub") for path in copied)


def test_folder_of_the_program_is_the_one_given_whatever_its_name() -> None:
    folder = """./a b: "c" $HOME ${x} # d"""
    mounts = compose(f"folder={folder}")["services"]["launcher"]["volumes"]
    assert mounts[-1] == {"type": "bind", "source": folder, "target": "/workspace", "read_only": True}


def docker(*words: str, cwd: Path) -> str:
    done = subprocess.run(["docker", *words], cwd=cwd, capture_output=True, text=True, timeout=scaled(900), check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def why_no_docker() -> str:
    if not shutil.which("docker"):
        return "there is no docker"
    for words in (("info",), ("compose", "version")):
        done = subprocess.run(["docker", *words], capture_output=True, text=True, check=False)
        if done.returncode:
            return f"docker {' '.join(words)}: {done.stderr.strip()}"
    return ""


@pytest.mark.package
@pytest.mark.timeout(2000)
def test_images_are_built_and_a_job_runs_on_the_three_hosts(tmp_path: Path) -> None:
    if why := why_no_docker():
        pytest.skip(f"the images are not built: {why}")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--outdir", str(tmp_path), str(ROOT)],
        capture_output=True,
        timeout=scaled(300),
        check=True,
    )
    (tmp_path / "Dockerfile").write_text(rendered("dockerfile"))
    (tmp_path / "compose.yaml").write_text(rendered("compose"))
    run = ("compose", "run", "--rm", "launcher", "distrun")
    try:
        docker("compose", "build", cwd=tmp_path)
        assert docker(*run, "--version", cwd=tmp_path).split() == ["distrun", __version__]
        job = ("launch", "-H", "/srv/train/hosts", "-n", "3", "-s", "1", "--sync-dst-dir", "~/job", "hostname")
        assert sorted(re.findall(r"\| (h\d)$", docker(*run, *job, cwd=tmp_path), re.MULTILINE)) == ["h1", "h2", "h3"]
    finally:
        docker("compose", "down", "--volumes", "--rmi", "local", cwd=tmp_path)
