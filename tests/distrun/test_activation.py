from __future__ import annotations

import os
import subprocess
import venv
from pathlib import Path

import pytest

from distrun.activation import folders, script
from distrun.errors import UsageError


def bash(text: str, home: Path, **env: str) -> tuple[int, dict[str, str], str]:
    """Run a text as an agent does; return its code, the environment that it leaves and its stderr."""
    result = subprocess.run(
        ["bash", "-lc", text + "\nenv -0"],
        env={"HOME": str(home), "PATH": "/usr/bin:/bin", **env},
        cwd=home,
        capture_output=True,
        check=False,
    )
    left = dict(line.split("=", 1) for line in result.stdout.decode("utf-8", "replace").split("\0") if "=" in line)
    return result.returncode, left, result.stderr.decode()


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/bash\n" + text)
    path.chmod(0o755)
    return path


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("with a 'blank'") / "my env"
    venv.create(folder, with_pip=False)
    return folder


def test_no_words_are_no_text() -> None:
    assert script([]) == ""


def test_a_virtual_environment_is_activated(environment: Path, tmp_path: Path) -> None:
    code, left, err = bash(script(["venv:%s" % environment]), tmp_path)
    assert (code, err) == (0, "")
    assert left["VIRTUAL_ENV"] == str(environment)
    assert left["PATH"].split(":")[0] == str(environment / "bin")


def test_a_home_folder_is_that_of_the_host_and_relative_paths_are_below_cwd(environment: Path, tmp_path: Path) -> None:
    (tmp_path / "an env").symlink_to(environment)
    for word in ("venv:~/an env", "venv:an env"):
        code, left, _ = bash(script([word]), tmp_path)
        assert code == 0
        assert left["PATH"].split(":")[0].endswith("/bin")
    code, _, err = bash(script(["venv:an env"], cwd="/no where"), tmp_path)
    assert code == 1
    assert "there is no /no where/an env/bin/activate on this host" in err


def test_a_virtual_environment_that_is_missing_or_broken_is_named(tmp_path: Path) -> None:
    code, left, err = bash(script(["venv:/nothing/here"]), tmp_path)
    assert code == 1
    assert left == {}
    assert err == "distrun: --activate venv:/nothing/here: there is no /nothing/here/bin/activate on this host\n"
    (tmp_path / "old" / "bin").mkdir(parents=True)
    (tmp_path / "old" / "bin" / "activate").touch()
    code, _, err = bash(script(["venv:~/old"]), tmp_path)
    assert code == 1
    assert "bin/python does not run here" in err


CONDA = """
if [ "$*" != "shell.bash hook" ]; then exit 3; fi
cat <<'END'
conda() {
    if [ "$1 $2" = "activate no such" ]; then echo EnvironmentNameNotFound >&2; return 1; fi
    export CONDA_DEFAULT_ENV="$2"
}
END
"""


@pytest.mark.parametrize("place", ["miniforge3/bin/conda", "else where/conda"])
def test_conda_is_found_and_its_environment_activated(place: str, tmp_path: Path) -> None:
    found = program(tmp_path / place, CONDA)
    env = {} if place.startswith("mini") else {"CONDA_EXE": str(found)}
    code, left, err = bash(script(["conda:my env's"]), tmp_path, **env)
    assert (code, err) == (0, "")
    assert left["CONDA_DEFAULT_ENV"] == "my env's"
    code, _, err = bash(script(["conda:no such"]), tmp_path, **env)
    assert code == 1
    assert err.endswith("distrun: --activate conda:no such: conda activate ended with code 1\n")


def test_a_conda_environment_may_be_a_folder_below_the_home(tmp_path: Path) -> None:
    program(tmp_path / "conda/bin/conda", CONDA)
    assert bash(script(["conda:~/envs/x"]), tmp_path)[1]["CONDA_DEFAULT_ENV"] == "%s/envs/x" % tmp_path


def test_a_missing_conda_is_said(tmp_path: Path) -> None:
    code, _, err = bash(script(["conda:base"]), tmp_path)
    assert code == 1
    assert "there is no conda on PATH" in err


MODULE = """
module() {
    case $2 in
        broken) echo "Unable to locate a modulefile" >&2; return 1 ;;
        silent) echo "ModuleCmd_Load.c(204):ERROR:105" >&2; return 0 ;;
    esac
    export LOADEDMODULES="$LOADEDMODULES:$2/1.0" LOADED_BY_TEST="$LOADED_BY_TEST $2"
}
"""


def test_modules_are_loaded_after_their_init_file(tmp_path: Path) -> None:
    (tmp_path / "init").mkdir()
    (tmp_path / "init" / "bash").write_text(MODULE)
    env = {"MODULESHOME": str(tmp_path)}
    code, left, err = bash(script(["module:gcc cuda", "module:gcc"]), tmp_path, **env)
    assert (code, err) == (0, "")
    assert left["LOADED_BY_TEST"].split() == ["gcc", "cuda", "gcc"]


@pytest.mark.parametrize(("name", "why"), [("broken", "ended with code 1"), ("silent", "did not load it")])
def test_a_module_that_does_not_load_is_an_error_even_where_module_says_nothing(
    name: str, why: str, tmp_path: Path
) -> None:
    code, _, err = bash(script([MODULE, "module:" + name]), tmp_path)
    assert code == 1
    assert "distrun: --activate module:%s: module load %s\n" % (name, why) in err


def test_a_host_without_modules_is_said(tmp_path: Path) -> None:
    code, _, err = bash(script(["module:gcc"]), tmp_path)
    if os.path.exists("/etc/profile.d/modules.sh") or os.path.exists("/usr/share/lmod"):
        pytest.skip("this machine has modules")
    assert code == 1
    assert "has no command `module`" in err


def test_snippets_run_in_order_with_their_quotes(tmp_path: Path) -> None:
    words = ["""export A="it's a" """, 'export B="$A \\$x"\nexport C=2', "export PATH=/first:$PATH", "unset C"]
    code, left, _ = bash(script(words), tmp_path)
    assert code == 0
    assert (left["A"], left["B"], "C" in left) == ("it's a", "it's a $x", False)
    assert left["PATH"].startswith("/first:")
    assert not [name for name in left if "distrun" in name]


@pytest.mark.parametrize("snippet", ["false", "export A='", "no_such_program_here"])
def test_a_snippet_that_fails_ends_it_and_is_named(snippet: str, tmp_path: Path) -> None:
    code, left, err = bash(script([snippet, "touch after"]), tmp_path)
    assert code == 1
    assert left == {}
    assert "distrun: --activate %s: it ended with code" % snippet in err
    assert not (tmp_path / "after").exists()


@pytest.mark.parametrize("word", ["", " ", "venv:", "conda:-n", "module:", "vnev:/x", "spack:gcc", "a\0b"])
def test_wrong_words_are_usage_errors(word: str) -> None:
    with pytest.raises(UsageError, match="--activate"):
        script([word])


def test_a_typing_error_is_met_with_a_proposal() -> None:
    with pytest.raises(UsageError) as caught:
        script(["cnda:base"])
    assert caught.value.hint == "did you mean conda:base?"


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ([], ()),
        (["venv:~/v", "module:cuda/12"], ("~/v",)),
        (["conda:train", "conda:./env"], ("./env",)),
        (["source x/bin/activate"], None),
        (["venv:v", "PATH=/x:$PATH"], None),
    ],
)
def test_folders_of_environments_are_known_unless_shell_text_may_name_others(
    words: list[str], found: tuple[str, ...] | None
) -> None:
    assert folders(words) == found
