"""The template `cloud-init`, by the schema of cloud-init, and its scripts as a shell reads them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from distrun import templates
from distrun.errors import UsageError

SCHEMA = Path(sys.prefix, "share/cloud-init/schema.json")
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIEXAMPLE ann@desk"
HARD = """a'b"c $HOME `id` $(id) ; : # é"""


def rendered(*values: str) -> str:
    return templates.render(templates.find("cloud-init"), [f"key={KEY}", *values])


def loaded(*values: str) -> dict[str, Any]:
    return yaml.safe_load(rendered(*values))


def setup_script(*values: str) -> str:
    (text,) = (each["content"] for each in loaded(*values)["write_files"] if each["path"].endswith("/distrun-setup"))
    return str(text)


def validate(data: object) -> None:
    if not SCHEMA.exists():
        pytest.skip("cloud-init's schema is not here; scripts/test setup fetches it from Debian's package cloud-init")
    # It declares draft 4, in which `$ref` beside other members counts only by itself; so does cloud-init.
    jsonschema.Draft4Validator(json.loads(SCHEMA.read_text("utf-8"))).validate(data)


@pytest.mark.parametrize(
    "values", [(), ("user=ann", "hosts=h1 h[2-4]", "packages=distrun torch"), (f"packages={HARD}",)]
)
def test_user_data_keeps_to_the_schema_of_cloud_init(values: tuple[str, ...]) -> None:
    validate(loaded(*values))


def test_first_line_is_the_one_by_which_cloud_init_knows_user_data() -> None:
    first, second, *_ = rendered().splitlines()
    assert first == "#cloud-config"
    assert second.startswith("# Made by distrun ")


def test_only_keys_let_in_and_only_the_key_that_was_given() -> None:
    found = loaded("user=ann")
    default, user = found["users"]
    assert default == "default"
    assert (user["name"], user["ssh_authorized_keys"], user["lock_passwd"]) == ("ann", [KEY], True)
    assert not {"sudo", "passwd", "hashed_passwd", "plain_text_passwd"} & set(user)
    assert (found["ssh_pwauth"], found["disable_root"]) == (False, True)


def test_private_key_in_place_of_the_public_one_is_refused_and_not_repeated() -> None:
    private = "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXktdjEAAAAA\n"
    with pytest.raises(UsageError, match="key: expected one line") as caught:
        rendered(f"key={private}")
    assert "b3Blb" not in str(caught.value)


def test_hosts_and_packages_stay_words_whatever_they_contain(tmp_path: Path) -> None:
    """By the shell itself, with what it would run replaced."""
    script = setup_script(f"hosts={HARD}", f"packages={HARD}").replace("/opt/distrun", str(tmp_path / "opt"))
    script = script.replace("/etc/distrun", str(tmp_path / "etc"))
    pip = tmp_path / "opt/bin/pip"
    pip.parent.mkdir(parents=True)
    pip.write_text(f"""#!/bin/sh\nprintf '%s\\n' "$@" >{tmp_path}/asked\n""")
    pip.chmod(0o755)
    subprocess.run(["sh", "-c", script], check=True, capture_output=True)
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked == ["install", "--quiet", "--disable-pip-version-check", *HARD.split()]
    python = f" python={tmp_path}/opt/bin/python3"
    assert (tmp_path / "etc/hosts").read_text().splitlines() == [word + python for word in HARD.split()]


def test_failed_installation_says_what_to_type_and_fails(tmp_path: Path) -> None:
    script = setup_script().replace("/opt/distrun", str(tmp_path / "opt"))
    pip = tmp_path / "opt/bin/pip"
    pip.parent.mkdir(parents=True)
    pip.write_text("#!/bin/sh\necho no network >&2\nexit 1\n")
    pip.chmod(0o755)
    done = subprocess.run(["sh", "-c", script, "distrun-setup"], check=False, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == (
        "no network\n"
        "distrun-setup: pip could not install distrun within 20 minutes; look above, then type: distrun-setup\n"
    )
