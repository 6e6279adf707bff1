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
from slowness import scaled

from distrun import shipping
from distrun_runtime.agent import stopping
from distrun_runtime.contract import environ, private

ROOT = Path(__file__).parents[3]
PROGRAMS = ("agent", "dialed", "coordinator")
START = shipping.START_AGENT
FULL = 0.92
"""Share of the limit at which a module has to leave its blob."""


def built(program: str, start: str = "") -> bytes:
    return {"agent": shipping.agent, "dialed": shipping.dialed, "coordinator": lambda: shipping.coordinator(start)}[
        program
    ]()


def unpack(line: bytes) -> tuple[str, dict[str, str]]:
    """The importer and the modules of a blob."""
    importer, modules = (zlib.decompress(binascii.a2b_base64(word)).decode() for word in line.split())
    return importer, json.loads(modules)


def with_start(line: bytes, start: str, before: str = START) -> bytes:
    """The agent's blob, but with something else to be run."""
    importer, modules = line.split()
    text = zlib.decompress(binascii.a2b_base64(importer)).decode()
    assert text.endswith(before)
    return (
        binascii.b2a_base64(zlib.compress((text[: -len(before)] + start).encode()), newline=False)
        + b" "
        + modules
        + b"\n"
    )


def test_the_blob_of_an_agent_that_dials_back_is_that_of_any_other_and_what_dials() -> None:
    importer, modules = unpack(shipping.agent())
    other, the_same = unpack(shipping.dialed())
    more = {"distrun_runtime.agent.dial", "distrun_runtime.agent.unpack", "distrun_runtime.contract.enrolment"}
    less = {f"distrun_runtime.agent.{name}" for name in ("waiting", "probe", "query")}
    less |= {"distrun_runtime.contract.daemon"}
    assert set(the_same) == set(modules) - less | more
    assert other.endswith(
        importer[importer.index("if sys.version_info") : -len(shipping.START_AGENT)] + shipping.START_DIALED
    )


@pytest.mark.parametrize("program", PROGRAMS)
def test_blob_is_one_line_and_far_from_its_limit(program: str) -> None:
    lines = [built(program), shipping.agent(with_origin=True)] if program == "agent" else [built(program)]
    for line in lines:
        limit = shipping.LIMITS["coordinator" if program == "coordinator" else "agent"]
        full = len(line) / limit
        figure = f"the blob of the {program} has {len(line):,} of {limit:,} bytes: it is {full:.0%} full"
        print(figure)
        assert full <= FULL, figure
        assert line.count(b"\n") == 1
        assert line.endswith(b"\n")


def test_the_limit_of_the_agents_blob_is_120_kib_and_the_overview_says_so() -> None:
    assert shipping.LIMITS == {"agent": 120 * 1024, "coordinator": 160 * 1024}
    overview = (ROOT / "docs" / "overview.md").read_text("utf-8")
    assert "of at most 120 KiB" in overview
    assert "of at most 160 KiB" in overview


def test_a_blob_over_its_limit_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    size = len(shipping.coordinator("")) - 1
    monkeypatch.setitem(shipping.LIMITS, "coordinator", size - 1)
    monkeypatch.setattr(shipping, "kept", lambda name, suffix, make: make())
    with pytest.raises(ValueError, match=f"the blob of the coordinator is {size} bytes, the limit is {size - 1}"):
        shipping.coordinator("")


@pytest.mark.parametrize("program", PROGRAMS)
def test_blob_holds_the_program_and_what_it_imports_of_the_contract(program: str) -> None:
    _, modules = unpack(built(program))
    root = Path(str(importlib.resources.files("distrun_runtime")))
    package = "coordinator" if program == "coordinator" else "agent"
    own = {f"distrun_runtime.{package}.{file.stem}".removesuffix(".__init__") for file in (root / package).glob("*.py")}
    own -= set({"agent": shipping.DIALING, "dialed": shipping.DIALED}.get(program, ()))
    contract = {f"distrun_runtime.contract.{file.stem}" for file in (root / "contract").glob("*.py")}
    imported = set()
    for source in modules.values():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom):
                imported |= {str(node.module), *(f"{node.module}.{each.name}" for each in node.names)}
    always = {"distrun_runtime", "distrun_runtime.errors", "distrun_runtime.contract"}
    assert set(modules) == always | own | (imported & contract)


IMPORT_ALL = """
import importlib, sys
for name in names:
    if not name.endswith("__main__"):
        importlib.import_module(name)
loaded = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "distrun_runtime"}
print(json.dumps([sorted(loaded), sorted({type(module.__loader__).__name__ for module in loaded.values()}), sys.path]))
"""


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_everything_a_blob_holds_is_imported_from_memory(program: str, version: str) -> None:
    starts = {"agent": shipping.START_AGENT, "dialed": shipping.START_DIALED}
    line = shipping.coordinator(IMPORT_ALL)
    if program in starts:
        line = with_start(built(program), IMPORT_ALL, starts[program])
    command = [need(version), "-I", "-S", "-c", shipping.BOOT]
    done = subprocess.run(command, input=line, capture_output=True, check=False, cwd="/")
    assert done.returncode == 0, done.stderr.decode()
    loaded, loaders, path = json.loads(done.stdout)
    _, modules = unpack(line)
    assert set(loaded) == {name for name in modules if not name.endswith("__main__")}
    assert loaders == ["Blob"]
    checkout = Path(str(importlib.resources.files("distrun_runtime"))).parent.parent
    assert not [place for place in path if Path(place).is_relative_to(checkout)]
    assert not [place for place in path if "site-packages" in place]


def test_blob_names_no_place_unless_asked() -> None:
    root = Path(str(importlib.resources.files("distrun_runtime")))
    for line in map(built, PROGRAMS):
        importer, modules = unpack(line)
        assert str(root) not in importer + json.dumps(modules)
    importer, _ = unpack(shipping.agent(with_origin=True))
    facts: dict[str, dict[str, str]] = {}
    exec(importer[: importer.index("if sys.version_info")], facts)
    assert {Path(path).exists() for path in facts["origin"].values()} == {True}


def test_boot_line_needs_no_quoting_beyond_single_quotes() -> None:
    assert "\n" not in shipping.BOOT
    assert shipping.BOOT.startswith(f'exec("{stopping.AGENT}')
    assert "'" not in shipping.BOOT
    assert not set("!$`") & set(shipping.BOOT)
    ast.parse(shipping.BOOT)


def sources() -> Iterator[Path]:
    root = Path(str(importlib.resources.files("distrun_runtime")))
    yield from (root / "errors.py", root / "__init__.py")
    for room in ("contract", "agent", "coordinator"):
        yield from sorted((root / room).glob("*.py"))


def plain(tree: ast.AST) -> str:
    """The tree without texts for readers, which are strings that are statements and the texts of the table's rows, and
    without the types of functions."""
    tree = _Untyped().visit(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in shipping.TABLE_ROWS:
            del node.args[1]
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [each for each in body if not _is_text(each)] or [ast.Pass()]  # type: ignore[attr-defined]
    return ast.dump(tree)


class _Untyped(ast.NodeTransformer):
    """Leaves out annotations of parameters, of results, and of variables of functions."""

    depth = 0

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.depth += 1
        node.returns = None
        found = self.generic_visit(node)
        self.depth -= 1
        return found

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if not self.depth or node.value is None:
            return node
        return ast.copy_location(ast.Assign([node.target], node.value), node)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def test_bare_source_means_the_same_on_the_same_lines() -> None:
    for path in sources():
        source = path.read_text("utf-8")
        bare, untyped = ast.parse(shipping.bare(source)), _Untyped().visit(ast.parse(source))
        lines = {(type(n), n.lineno) for n in ast.walk(bare) if isinstance(n, ast.stmt) and not _is_text(n)}
        before = {(type(n), n.lineno) for n in ast.walk(untyped) if isinstance(n, ast.stmt) and not _is_text(n)}
        assert lines == before, path
        assert plain(bare) == plain(untyped), path


def test_lines_of_long_strings_stay() -> None:
    source = 'if x:\n    y = """a\n    # b\n"""  # gone\n    pass\n'
    assert shipping.bare(source) == 'if x:\n    y = """a\n    # b\n"""\n    pass\n'


@given(st.text(alphabet="#'\" ab", max_size=12))
def test_strings_that_look_like_comments_stay(text: str) -> None:
    source = "x = %r  # gone\n" % text
    assert ast.literal_eval(shipping.bare(source).strip().partition("= ")[2]) == text


@pytest.mark.slow  # scripts/check asks vermin, too
def test_travelling_files_keep_to_python_3_8() -> None:
    vermin = [str(Path(sys.executable).with_name("vermin")), "-q", "--no-tips", "-t=3.8-", "--violations"]
    # Used only where they exist: behind hasattr, or never evaluated (annotations).
    allowed = ["--exclude", "os.pidfd_open", "--exclude", "signal.pidfd_send_signal", "--no-eval-annotations"]
    command = [*vermin, *allowed, *map(str, sources())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=scaled(120), check=False)
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
    command = shipping.command(need(version))
    done = subprocess.run(command, input=shipping.agent(), capture_output=True, check=False)
    assert done.returncode == 1
    assert b"the agent needs 3.8 or newer" in done.stderr
    assert done.stdout == b""


def test_input_that_ends_too_early_is_said_plainly() -> None:
    done = subprocess.run(shipping.command(sys.executable), input=b"abc", capture_output=True, check=False)
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


def test_traceback_of_the_agent_names_file_and_line_of_the_checkout() -> None:
    failing = "from distrun_runtime.contract import session\nsession.encode({'type': 'x', 'bad': {1, 2}})\n"
    line = with_start(shipping.agent(), failing)
    done = subprocess.run(shipping.command(sys.executable), input=line, capture_output=True, check=False)
    found = re.search(r'File "<distrun agent>/distrun_runtime/contract/session.py", line (\d+)', done.stderr.decode())
    assert found
    source = next(path for path in sources() if path.name == "session.py").read_text("utf-8")
    assert "json.dumps(header" in source.splitlines()[int(found.group(1)) - 1]


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
    command = shipping.command(sys.executable)
    done = subprocess.run(command, input=shipping.agent(), capture_output=True, check=False, env=environment)
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
            assert private.cache_folder("agent") == str(file.parent)
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


HEAVY = {"asyncio", "ctypes", "dataclasses", "email", "hashlib", "http", "logging", "multiprocessing", "pathlib", "ssl"}


def test_an_agent_starts_without_the_modules_that_take_long_to_import() -> None:
    program = (
        "import json, sys\nbefore = set(sys.modules)\n"
        "import distrun_runtime.agent.guard, distrun_runtime.agent.agent\n"
        "print(json.dumps(sorted({name.partition('.')[0] for name in set(sys.modules) - before})))"
    )
    line = with_start(shipping.agent(), program)
    done = subprocess.run(shipping.command(sys.executable), input=line, capture_output=True, check=True)
    loaded = set(json.loads(done.stdout))
    assert "distrun_runtime" in loaded
    assert not loaded & HEAVY


def test_what_the_table_of_variables_says_to_readers_stays_at_home() -> None:
    source = unpack(shipping.agent())[1]["distrun_runtime.contract.environ"]
    module: dict[str, object] = {"__name__": "travelled"}
    exec(compile(source, "environ", "exec", dont_inherit=True), module)
    table = module["TABLE"]
    assert isinstance(table, tuple)
    assert [row._replace(doc="") for row in table] == [row._replace(doc="") for row in environ.TABLE]
    assert {row.doc for row in table} == {"."}
    assert source.count("\n") == Path(environ.__file__).read_text().count("\n"), "lines keep their numbers"
