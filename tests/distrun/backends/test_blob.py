"""The agent as one line: small, whole, quick, and at home in every Python from 3.8."""

from __future__ import annotations

import ast
import binascii
import importlib.resources
import json
import marshal
import os
import re
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from agentkit import agent, shell
from hypothesis import given
from hypothesis import strategies as st
from pythons import TOO_OLD, VERSIONS, need

from distrun.backends import blob
from distrun_runtime.agent import cache
from distrun_runtime.contract import environ

MAIN = "code = guard.serve(r, keep)"


def unpack(line: bytes) -> dict[str, dict[str, str]]:
    """The first part's members, and the second part as `modules`."""
    head, modules = (json.loads(zlib.decompress(binascii.a2b_base64(part))) for part in line.split(b"."))
    return {**head, "modules": modules}


PROGRAMS = {"agent": blob.AGENT, "coordinator": blob.COORDINATOR}


@pytest.mark.parametrize("with_origin", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_blob_is_one_line_and_fills_less_than_80_percent_of_its_limit(name: str, with_origin: bool) -> None:
    assert blob.LIMIT == 96 * 1024
    line = blob.build(PROGRAMS[name], with_origin)
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    full = 100 * len(line) / blob.LIMIT
    assert full < 80, "the blob of the %s: %d of %d bytes, %.1f %%" % (name, len(line), blob.LIMIT, full)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_blob_holds_every_module_of_its_packages_but_for_those_that_stay_at_home(name: str) -> None:
    parts = unpack(blob.build(PROGRAMS[name]))
    root = Path(str(importlib.resources.files("distrun_runtime")))
    expected = {"distrun_runtime", "distrun_runtime.errors"}
    for package in ("contract", name):
        for file in (root / package).glob("*.py"):
            module = "distrun_runtime.%s.%s" % (package, file.stem)
            expected.add(module.removesuffix(".__init__"))
    left_out = {"distrun_runtime.coordinator." + each.removesuffix(".py") for each in blob.LEFT_OUT}
    assert left_out < expected or name == "agent"
    assert set(parts["modules"]) == expected - left_out


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_module_of_a_blob_imports_what_is_not_in_it(name: str) -> None:
    modules = unpack(blob.build(PROGRAMS[name]))["modules"]
    for module, source in modules.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("distrun_runtime"):
                names = {"%s.%s" % (node.module, each.name) for each in node.names}
                missing = {each for each in names if each not in modules and node.module not in modules}
                assert not missing, module
                at_home = {Path(each).stem for each in blob.LEFT_OUT}
                assert not {each.name for each in node.names} & at_home, module


def test_the_coordinators_blob_is_imported_from_memory(tmp_path: Path) -> None:
    """By a Python that finds nothing of ours anywhere else."""
    told = "print(jobrun.__file__, len([n for n in sys.modules if n.startswith('distrun_runtime.')]))\n"
    program = blob.COORDINATOR._replace(start=blob.COORDINATOR.start + told)
    command = (sys.executable, "-S", *blob.command(sys.executable)[1:])
    done = subprocess.run(
        command,
        input=blob.build(program),
        capture_output=True,
        timeout=60,
        check=False,
        cwd=tmp_path,
        env={"HOME": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr.decode()
    file, count = done.stdout.decode().rsplit(" ", 1)
    assert file == "<distrun>/distrun_runtime/coordinator/jobrun.py"
    assert int(count) > 10


def test_blob_names_no_place_unless_asked() -> None:
    parts = unpack(blob.build())
    root = Path(str(importlib.resources.files("distrun_runtime")))
    assert parts["origin"] == {}
    assert str(root) not in json.dumps(parts)
    origin = unpack(blob.build(blob.AGENT, with_origin=True))["origin"]
    assert {Path(path).exists() for path in origin.values()} == {True}


def test_boot_line_needs_no_quoting_beyond_single_quotes() -> None:
    assert "\n" not in blob.BOOT
    assert "'" not in blob.BOOT
    assert not set("!$`") & set(blob.BOOT)
    ast.parse(blob.BOOT)


def sources() -> Iterator[Path]:
    root = Path(str(importlib.resources.files("distrun_runtime")))
    yield from (root / "errors.py", root / "__init__.py")
    for room in ("contract", "agent", "coordinator"):
        yield from sorted((root / room).glob("*.py"))


def plain(tree: ast.AST) -> str:
    """The tree without texts for readers, which are strings that are statements and the texts of the table's rows."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == blob.TABLE_ROW:
            del node.args[3]
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [each for each in body if not _is_text(each)] or [ast.Pass()]  # type: ignore[attr-defined]
    return ast.dump(tree)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def test_bare_source_means_the_same_on_the_same_lines() -> None:
    for path in sources():
        source = path.read_text("utf-8")
        bare = blob.bare(source)
        assert plain(ast.parse(bare)) == plain(ast.parse(source)), path
        lines = {(type(n), n.lineno) for n in ast.walk(ast.parse(bare)) if isinstance(n, ast.stmt)}
        before = {(type(n), n.lineno) for n in ast.walk(ast.parse(source)) if isinstance(n, ast.stmt)}
        assert lines == before, path


def test_lines_of_long_strings_stay_and_other_lines_are_indented_by_one_blank() -> None:
    source = 'if x:\n    y = """a\n    b\n"""\n    z = (1,\n         2)\n    if z:\n        pass\n'
    assert blob.bare(source) == 'if x:\n y = """a\n    b\n"""\n z = (1,\n2)\n if z:\n  pass\n'


@given(st.text(alphabet="#'\" ab", max_size=12))
def test_strings_that_look_like_comments_stay(text: str) -> None:
    source = "x = %r  # gone\n" % text
    assert ast.literal_eval(blob.bare(source).strip().partition("= ")[2]) == text


def test_travelling_files_keep_to_python_3_8() -> None:
    vermin = [str(Path(sys.executable).with_name("vermin")), "-q", "--no-tips", "-t=3.8-", "--violations"]
    # Used only where they exist: behind hasattr, or never evaluated (annotations).
    allowed = ["--exclude", "os.pidfd_open", "--exclude", "signal.pidfd_send_signal", "--no-eval-annotations"]
    command = [*vermin, *allowed, *map(str, sources())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for path in sources():
        ast.parse(path.read_text("utf-8"), feature_version=(3, 8))


@pytest.mark.parametrize("version", VERSIONS)
def test_agent_runs_under_every_python_that_is_here(version: str) -> None:
    word = os.fsdecode(b"\xff $x 'q'")
    with agent(shell('printf %s "$W"; exit 3'), python=need(version), with_origin=False) as driver:
        driver.begin()
        driver.spawn(W=word)
        assert driver.exited()["code"] == 3
        assert driver.text() == os.fsencode(word)
        assert driver.finish() == 0


@pytest.mark.parametrize("version", VERSIONS)
def test_tools_answer_under_every_python_that_is_here(version: str) -> None:
    questions: dict[str, dict[str, object]] = {
        "survey": {},
        "sweep": {"job": "no-such-job", "grace_s": 0.1},
        "match": {"regex": "no such command line", "kill": False},
        "probe": {"cwd": "/"},
        "listen": {"address": "127.0.0.1"},
        "connect": {"targets": [], "limit_s": 1},
        "close": {},
    }
    with agent(python=need(version), with_origin=False) as driver:
        for number, (what, args) in enumerate(questions.items()):
            driver.say("ask", id=number, what=what, args=args)
            assert "error" not in driver.wait("answer", id=number).header, what


@pytest.mark.portable
@pytest.mark.parametrize("version", VERSIONS)
def test_agent_ends_its_tasks_under_every_python_that_is_here(version: str) -> None:
    for env in ({}, {"DISTRUN_PORTABLE": "1"}):
        with agent(
            shell("setsid sleep 600 & echo ready; wait"), python=need(version), with_origin=False, env=env
        ) as driver:
            driver.begin()
            driver.spawn()
            driver.hear_until(lambda driver=driver: driver.text(), "ready")  # type: ignore[misc]
            driver.close_input()
            assert driver.exited()["signal"] == "TERM"
            driver.wait("bye")
            assert driver.leftovers() == []


@pytest.mark.parametrize("version", TOO_OLD)
def test_python_that_is_too_old_is_named_with_the_fix(version: str) -> None:
    command = blob.command(need(version))
    done = subprocess.run(command, input=blob.build(), capture_output=True, timeout=60, check=False)
    assert done.returncode == 1
    assert b"the agent needs 3.8 or newer" in done.stderr
    assert done.stdout == b""


def test_input_that_ends_too_early_is_said_plainly() -> None:
    done = subprocess.run(blob.command(sys.executable), input=b"abc", capture_output=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.strip() == b"distrun: standard input ended before the agent had arrived"


def test_modules_of_the_users_folder_are_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("json", "selectors", "socket", "subprocess", "distrun_runtime"):
        (tmp_path / (name + ".py")).write_text("raise SystemExit('the wrong module')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with agent(shell("exit 0")) as driver:
        driver.begin()
        driver.spawn()
        assert driver.exited()["code"] == 0


def with_importer(old: str, new: str) -> bytes:
    """The blob with a changed importer."""
    first, _, second = blob.build().partition(b".")
    head = json.loads(zlib.decompress(binascii.a2b_base64(first)))
    assert old in head["importer"]
    text = json.dumps({**head, "importer": head["importer"].replace(old, new)}).encode()
    return binascii.b2a_base64(zlib.compress(text), newline=False) + b"." + second


def test_traceback_of_the_agent_names_file_and_line_of_the_checkout() -> None:
    failing = "from distrun_runtime.contract import wire\nwire.encode({'type': 'x', 'bad': {1, 2}})\n"
    line = with_importer(MAIN, failing)
    done = subprocess.run(blob.command(sys.executable), input=line, capture_output=True, timeout=60, check=False)
    found = re.search(r'File "<distrun>/distrun_runtime/contract/wire.py", line (\d+)', done.stderr.decode())
    assert found
    source = next(path for path in sources() if path.name == "wire.py").read_text("utf-8")
    assert "json.dumps(" in source.splitlines()[int(found.group(1)) - 1]


def serve_once(cache: Path) -> str:
    """Run one agent to its end and return what it wrote to stderr."""
    with agent(shell("exit 0"), env={"XDG_CACHE_HOME": str(cache)}, with_origin=False) as driver:
        driver.begin()
        driver.spawn()
        assert driver.exited()["code"] == 0
        assert driver.finish() == 0
        return driver.job


def kept(cache: Path) -> list[Path]:
    return sorted((cache / "distrun" / "agent").glob("*.code"))


def test_the_first_agent_keeps_its_modules_compiled_for_the_next(tmp_path: Path) -> None:
    serve_once(tmp_path)
    [file] = kept(tmp_path)
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700
    codes = marshal.loads(file.read_bytes())
    assert "distrun_runtime.agent.agent" in codes
    before = file.stat().st_mtime_ns
    serve_once(tmp_path)
    assert kept(tmp_path) == [file]
    assert file.stat().st_mtime_ns == before
    stand_in = compile("def serve(*_): print('kept', flush=True); return 5", "x", "exec")
    codes["distrun_runtime.agent.guard"] = marshal.dumps(stand_in)
    file.write_bytes(marshal.dumps(codes))
    environment = dict(os.environ, XDG_CACHE_HOME=str(tmp_path))
    command = blob.command(sys.executable)
    done = subprocess.run(command, input=blob.build(), capture_output=True, timeout=60, check=False, env=environment)
    assert (done.returncode, done.stdout) == (5, b"kept\n"), "it was used"
    codes["distrun_runtime.agent.guard"] = b"broken"
    file.write_bytes(marshal.dumps(codes))
    serve_once(tmp_path)
    file.chmod(0o620)
    serve_once(tmp_path)  # written by others, perhaps: not used


def test_the_importer_and_the_agent_agree_on_which_folders_can_be_used(tmp_path: Path) -> None:
    serve_once(tmp_path)
    [file] = kept(tmp_path)
    before = file.stat().st_mtime_ns
    for folder in (file.parent, file.parent.parent):
        folder.chmod(0o775)
        serve_once(tmp_path)
        assert folder.stat().st_mode & 0o777 == 0o755
        assert (file.stat().st_mtime_ns, kept(tmp_path)) == (before, [file]), "it is used"
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", str(tmp_path))
            folder.chmod(0o775)
            assert cache.folder("agent") == str(file.parent)
            assert folder.stat().st_mode & 0o777 == 0o755
    elsewhere = tmp_path / "elsewhere"
    file.parent.rename(elsewhere)
    file.parent.symlink_to(elsewhere)
    (elsewhere / file.name).unlink()
    serve_once(tmp_path)
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize("rubbish", [b"", b"rubbish", marshal.dumps(7), marshal.dumps({"distrun_runtime": 7})])
def test_compiled_modules_that_are_broken_are_made_again(tmp_path: Path, rubbish: bytes) -> None:
    serve_once(tmp_path)
    [file] = kept(tmp_path)
    whole = file.read_bytes()
    file.write_bytes(rubbish)
    serve_once(tmp_path)
    assert kept(tmp_path) == [file]
    assert file.read_bytes() == whole


def test_an_agent_does_without_a_cache(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    serve_once(tmp_path / "file")


def test_agent_starts_fast() -> None:
    """Under 100 ms of CPU beyond a bare interpreter's start; here with room for a busy machine."""
    imports = "from distrun_runtime.agent import guard\n"
    timing = (
        "import time\nt = time.process_time()\n" + imports + "print(time.process_time() - t, flush=True)\ncode = 0\n"
    )
    line = with_importer(imports + "gc.enable()\n" + MAIN, timing)
    command = blob.command(sys.executable)
    times = [
        float(subprocess.run(command, input=line, capture_output=True, timeout=60, check=True).stdout) for _ in range(5)
    ]
    assert min(times) < 0.15, times


def test_what_the_table_of_variables_says_to_readers_stays_at_home() -> None:
    source = unpack(blob.build())["modules"]["distrun_runtime.contract.environ"]
    module: dict[str, object] = {"__name__": "travelled"}
    exec(compile(source, "environ", "exec", dont_inherit=True), module)
    table = module["TABLE"]
    assert isinstance(table, tuple)
    assert [row._replace(doc="") for row in table] == [row._replace(doc="") for row in environ.TABLE]
    assert {row.doc for row in table} == {"."}
    assert source.count("\n") == Path(environ.__file__).read_text().count("\n"), "lines keep their numbers"
