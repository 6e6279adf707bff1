"""What hosts are sent: the runtime for tasks as an archive, the programs of agent and coordinator as blobs.

On this machine the runtime is a folder that is put on the tasks' PYTHONPATH. The folder has the runtime and nothing
else that can be imported. Other hosts are sent the archive: the sources of the package distrun_runtime, named by the
archive's digest, and keep it unpacked under that name; a copy that has to be made here is the same archive, unpacked
under the same name.

The same sources give the same bytes: names are sorted, times and modes fixed. The archive is small (compressed, about a
quarter of a megabyte), so that it goes to an agent in one frame.
"""

from __future__ import annotations

import binascii
import contextlib
import functools
import io
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import distrun_runtime
from distrun.errors import PreflightError
from distrun_runtime.agent import cache
from distrun_runtime.contract import private

if TYPE_CHECKING:
    import ast


# Keeps in the user's cache what takes long to make and is the same until a source changes. Nothing needs the cache.
#
# Files are named by what they were made from (`contract.private`), and are read only from a folder that no other
# user can write to (the same). What is damaged is removed and made again.


KIND = "launcher"
COPIES = 4
"""So many files of a kind stay: a user may have several versions of distrun."""


def kept(name: str, suffix: str, make: Callable[[], bytes]) -> bytes:
    """Return what `make` returned when it was last called for this `name`, or call it.

    Args:
        name: a digest of everything that `make` depends on.
        suffix: of which kind it is; COPIES files of a kind stay.
        make: never returns nothing.
    """
    file = name + suffix
    with contextlib.suppress(OSError):
        data = private.read_cached(str(Path(private.cache_folder(KIND), file)))
        if data:
            return data
    data = make()
    with contextlib.suppress(OSError):  # a full or read-only disk: it is made again next time
        folder = Path(private.make_cache(KIND))
        private.write_cached(str(folder / file), data)
        for path in sorted(folder.glob("*" + suffix), key=os.path.getmtime)[:-COPIES]:
            path.unlink()
    return data


PACKAGE = "distrun_runtime"
SUFFIXES = (".py", ".c", ".typed")
FORMAT = 1
"""Another one where the same sources are to give another archive."""
_EPOCH = (1980, 1, 1, 0, 0, 0)
"""The earliest time that a zip can hold."""
_MODE = 0o100644 << 16


def runtime_root(env: Mapping[str, str], copy: bool = True) -> Path:
    """Return the folder that holds the package distrun_runtime alone.

    In a checkout that is `runtime/`. Installed in site-packages the runtime lies beside other packages, which must not
    come before the user's own packages: then it is a copy under `$XDG_CACHE_HOME/distrun/runtime`, named by the
    archive's digest and made once (`copy` False: only its name is found out).

    Raises:
        PreflightError: the copy cannot be written.
    """
    source = location()
    if not has_siblings(source):
        return source.parent
    digest, data = archive(source)
    found = cache.find(digest, env)
    if not found and copy:
        try:
            found = cache.install(digest, data, env)
        except OSError as err:
            raise PreflightError(
                f"cannot keep a copy of the runtime for the tasks in {private.cache_root(env)}: {err.strerror or err}",
                "set XDG_CACHE_HOME to a place that can be written",
            ) from err
    return Path(found or private.cache_root(env), *(() if found else (cache.RUNTIME, digest)))


def has_siblings(package: Path) -> bool:
    """Return whether something else beside `package` could be imported from its parent."""
    return any(
        other != package
        and not other.name.startswith((".", "__"))
        and (other.is_dir() or other.suffix in (".py", ".so", ".pth", ".egg-link"))
        for other in package.parent.iterdir()
    )


def archive(package: Path | None = None) -> tuple[str, bytes]:
    """Return the archive's digest (SHA-256, 64 hex digits) and its bytes, a zip.

    Unpacked into a folder that is put on PYTHONPATH, `distrun_runtime` can be imported from it. `package` is the
    package's folder; None: the one that this process uses.
    """
    import hashlib  # local jobs need no archive

    sources = _sources(location() if package is None else package)
    # Compressing takes longer than all else that a small launch does itself.
    data = kept(_name(sources), ".runtime.zip", lambda: _zip(sources))
    return hashlib.sha256(data).hexdigest(), data


def location() -> Path:
    """Return the folder of the package distrun_runtime that this process uses."""
    return Path(distrun_runtime.__file__).resolve().parent


def _sources(package: Path) -> dict[str, bytes]:
    found = {path.relative_to(package).as_posix(): path for path in package.rglob("*") if path.suffix in SUFFIXES}
    return {name: found[name].read_bytes() for name in sorted(found, key=os.fsencode) if found[name].is_file()}


def _name(sources: Mapping[str, bytes]) -> str:
    """Return a digest of all that the archive is made from: the sources, and what compresses them."""
    import hashlib
    import zlib

    digest = hashlib.sha256((f"{FORMAT} {zlib.ZLIB_RUNTIME_VERSION}").encode())
    for name, source in sources.items():
        digest.update(b"%d %s\0%d " % (len(os.fsencode(name)), os.fsencode(name), len(source)) + source)
    return digest.hexdigest()


def _zip(sources: Mapping[str, bytes]) -> bytes:
    import zipfile

    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as packed:
        for name, source in sources.items():
            entry = zipfile.ZipInfo(f"{PACKAGE}/{name}", _EPOCH)
            entry.create_system = 3  # unix: the mode below means something
            entry.external_attr = _MODE
            entry.compress_type = zipfile.ZIP_DEFLATED
            packed.writestr(entry, source, compresslevel=9)
    return buffer.getvalue()


# Builds the blobs: the agent's and the coordinator's program as one line of text each, imported from memory on a host.
#
# A host needs only a python3 of at least 3.8. It is started as `python -I -c BOOT` and reads its program from standard
# input: the first line is the blob, frames follow. BOOT contains no character that a shell would touch inside single
# quotes; nothing else has to be quoted.
#
# A blob is two words of base64. The first is the importer, Python source. The second is the source of the modules; it
# is only unpacked if a module is not in the cache. Compiling takes a third of an agent's start, so the first agent of a
# version on a host keeps the compiled modules in the user's cache, in a folder that only the user can write to. If that
# is not possible, each agent compiles them.
#
# The local backend uses the same blob, with the true file names (`with_origin`), so that tracebacks and coverage name
# the checkout. Docstrings, comments and types are left out; line numbers stay.


LIMITS = {"agent": 120 * 1024, "coordinator": 160 * 1024}
"""Bytes of base64, by program. The agent's stays below the 128 KiB to which Linux caps one string of an exec, should it
ever travel as an argument. The coordinator's goes to one host of a detached job, always as input."""
SHARED = ("__init__.py", "errors.py")
DIALING = (f"{PACKAGE}.agent.dial", f"{PACKAGE}.agent.unpack")
"""What only agents that dial back need: the others get files by rsync."""
DIALED = (f"{PACKAGE}.agent.waiting", f"{PACKAGE}.agent.probe", f"{PACKAGE}.agent.query")
"""Modules that an agent which dials back does not need: it is never dialed, and answers no questions without a job."""
TABLE_ROWS = ("_gives", "_both", "_reads")
"""Functions whose calls make the rows of `contract.environ.TABLE`. The second argument is documentation."""

_IMPORT = r"(?m)^ *from ([\w.]+) import (\([^)]*\)|[^\n]*)"

BOOT = (
    'exec("import binascii,json,os,sys,zlib\\n'
    "if sys.version_info>=(3,8):import signal;signal.pthread_sigmask(signal.SIG_SETMASK,[])\\n"
    "b=bytearray()\\n"
    "while b.find(10)<0:\\n"
    " d=os.read(0,65536)\\n"
    ' if not d:sys.exit(\\"distrun: standard input ended before the agent had arrived\\")\\n'
    " b+=d\\n"
    "l,_,r=bytes(b).partition(bytes([10]))\\n"
    "importer,modules=[binascii.a2b_base64(each) for each in l.split()]\\n"
    'exec(zlib.decompress(importer))")'
)
"""Python source of one line: reads the blob from descriptor 0, leaves what came after it in `r`, runs its importer.

`stopping.AGENT` is its beginning: by that agents are told from tasks.

It blocks no signal, whatever its starter does; an old Python must come to the importer's message.
"""

# Before this text come the blob's own facts: `names`, `packages`, `origin`, `digest`. After it comes what is to be run.
# Nothing from importlib: it costs up to 25 ms. No f-strings or the like: an old Python must come to the message.
# `inspect` costs 6 ms and is imported by `dataclasses` for what is not used here. It is imported when it is used.
# Nothing is collected while modules are imported: there is no garbage, and looking for it costs 2 ms.
IMPORTER = '''\
if sys.version_info < (3, 8):
    sys.exit("distrun: this host's %s is Python %s; the agent needs 3.8 or newer, name one that is"
             % (sys.executable, sys.version.split()[0]))
import gc
gc.disable()
import marshal
from _frozen_importlib import ModuleSpec
from _frozen_importlib_external import MAGIC_NUMBER

def load_inspect(name):
    if sys.modules.get("inspect") is late:
        del sys.modules["inspect"]
    import inspect
    return getattr(inspect, name)

late = type(sys)("inspect")
late.__getattr__ = load_inspect
sys.modules.setdefault("inspect", late)

cache = os.environ.get("XDG_CACHE_HOME", "")
cache = os.path.join(cache if os.path.isabs(cache) else os.path.join(os.path.expanduser("~"), ".cache"), "distrun")
folder = os.path.join(cache, "agent")
file = os.path.join(folder, digest + "-" + binascii.hexlify(MAGIC_NUMBER).decode() + ".code")
codes = {}
sources = {}

def is_private(path):
    info = os.lstat(path)
    return info.st_uid == os.geteuid() and not info.st_mode & 18

def mended(path):
    # As contract/private.py does it: if others can write to a folder of ours, they cannot have put files of ours
    # there.
    info = os.lstat(path)
    if info.st_mode & 61440 != 16384 or info.st_uid != os.geteuid():
        return False
    if info.st_mode & 18:
        os.chmod(path, info.st_mode & 4095 & ~18)
    return True

def source(name):
    if not sources:
        sources.update(json.loads(zlib.decompress(modules).decode()))
    return sources[name]

def compiled(name):
    return compile(source(name), blob.get_filename(name), "exec", dont_inherit=True)

def keep():
    try:
        if all(name in codes for name in names):
            return
        os.makedirs(cache, 448, exist_ok=True)
        if not os.path.isdir(folder):
            os.mkdir(folder, 448)
        if not (mended(cache) and mended(folder)):
            return
        data = marshal.dumps(dict((name, marshal.dumps(compiled(name))) for name in names))
        fresh = file + binascii.hexlify(os.urandom(4)).decode()
        with open(fresh, "xb") as out:
            os.chmod(fresh, 384)
            out.write(data)
        os.replace(fresh, file)
        import time
        for name in os.listdir(folder):
            path = os.path.join(folder, name)
            if os.lstat(path).st_mtime < time.time() - 30 * 86400:
                os.unlink(path)
    except Exception:
        pass

try:
    if mended(cache) and mended(folder) and is_private(file):
        with open(file, "rb") as kept:
            codes = marshal.loads(kept.read())
    if not all(type(code) is bytes for code in codes.values()):
        codes = {}
except Exception:
    codes = {}

class Blob:
    """Imports what the blob holds, and nothing else."""

    def find_spec(self, name, path=None, target=None):
        if name not in names:
            return None
        spec = ModuleSpec(name, self, origin=self.get_filename(name), is_package=name in packages)
        spec.has_location = True
        return spec

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        name = module.__spec__.name
        try:
            code = marshal.loads(codes[name])
        except Exception:
            code = None
        exec(code if type(code) is type(is_private.__code__) else compiled(name), module.__dict__)

    def is_package(self, name):
        return name in packages

    def get_filename(self, name):
        return origin.get(name) or "<distrun agent>/" + name.replace(".", "/") + ".py"

    def get_source(self, name):
        return source(name)

blob = Blob()
sys.meta_path.insert(0, blob)
'''

_START = """\
from distrun_runtime.%s
gc.enable()
code = %s
sys.stderr.flush()
os._exit(code)  # taking the interpreter down costs 10 ms, in the agent and in its guard
"""

START_AGENT = _START % ("agent import __main__ as main, guard", "guard.serve(main.run_agent, r, keep)")
_SERVE_DIALED = "guard.serve(main.run_agent, r, keep, *dial.redialing(s, *dialed))"
START_DIALED = _START % ("agent import __main__ as main, dial, guard", _SERVE_DIALED)
"""The same for an agent that has dialled, with the names that `bootstrap.PROGRAM` leaves."""
START_HOSTED = _START % ("coordinator import hosted", "hosted.main(r)")
"""Runs a detached job on one of its hosts."""


def command(python: str) -> tuple[str, ...]:
    """Return the argument list that starts a program; its blob goes to standard input first.

    -I: neither the current folder nor PYTHONPATH may put a module of the user's in the program's way.
    """
    return (python, "-I", "-c", BOOT)


@functools.lru_cache(maxsize=1)
def dialed() -> bytes:
    """Return the blob of an agent that dials back (`bootstrap`): one line, newline included. Raises as `agent`."""
    return _kept("agent", START_DIALED, with_origin=False, without=DIALED)


@functools.lru_cache(maxsize=2)
def agent(with_origin: bool = False) -> bytes:
    """Return the agent's blob: one line, newline included.

    Args:
        with_origin: name the true files of this machine in tracebacks (the agent runs here).

    Raises:
        ValueError: it is over its limit. A test fails long before.
    """
    return _kept("agent", START_AGENT, with_origin, without=DIALING)


def coordinator(start: str) -> bytes:
    """Return the coordinator's blob.

    Args:
        start: Python source that is run when everything can be imported.

    Raises:
        ValueError: it is over its limit. A test fails long before.
    """
    return _kept("coordinator", start, with_origin=False, without=())


def _kept(program: str, start: str, with_origin: bool, without: Sequence[str]) -> bytes:
    root = Path(distrun_runtime.__file__).parent
    files, sources = {}, {}
    for file in sorted([*map(root.joinpath, SHARED), *root.glob("contract/*.py"), *root.glob(f"{program}/*.py")]):
        name = ".".join((PACKAGE, *file.relative_to(root).with_suffix("").parts)).removesuffix(".__init__")
        if name not in without:
            files[name], sources[name] = str(file), file.read_text(encoding="utf-8")

    def make() -> bytes:
        return _line(program, start, _travelling(sources), sources, files if with_origin else {})

    # Leaving out what need not travel takes a fifth of a second; this very module says how.
    made_from = [program, start, str(with_origin), *files.values(), *sources.values()]
    return kept(_digest("\0".join([*made_from, Path(__file__).read_text(encoding="utf-8")])), ".blob", make)


def _travelling(sources: Mapping[str, str]) -> list[str]:
    """Return the names of the modules that travel: the program's, and what they import, anywhere, of the others."""
    found = {name for name in sources if not name.startswith(f"{PACKAGE}.contract.")}
    todo = list(found)
    while todo:
        for package, names in re.findall(_IMPORT, sources[todo.pop()]):
            for name in (package, *(f"{package}.{each}" for each in re.findall(r"\w+", names))):
                if name in sources and name not in found:
                    found.add(name)
                    todo.append(name)
    return sorted(found)


def _line(
    program: str, start: str, names: Sequence[str], sources: Mapping[str, str], files: Mapping[str, str]
) -> bytes:
    modules = {name: bare(sources[name]) for name in names}
    origin = {name: files[name] for name in names if name in files}
    facts = {
        "names": sorted(modules),
        "packages": [PACKAGE, f"{PACKAGE}.contract", f"{PACKAGE}.{program}"],
        "origin": origin,
        "digest": _digest(json.dumps([modules, origin], sort_keys=True))[:32],
    }
    importer = "".join(f"{name} = {value!r}\n" for name, value in facts.items()) + IMPORTER + start
    import zlib  # only needed for the first launch of a version

    words = (importer, json.dumps(modules, sort_keys=True, ensure_ascii=False))
    line = b" ".join(binascii.b2a_base64(zlib.compress(word.encode("utf-8"), 9), newline=False) for word in words)
    if len(line) > LIMITS[program]:
        raise ValueError(
            f"the blob of the {program} is {len(line)} bytes, the limit is {LIMITS[program]}; leave a module out"
        )
    return line + b"\n"


def _digest(text: str) -> str:
    import hashlib  # with OpenSSL: while the agent's interpreter starts

    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def bare(source: str) -> str:
    """Return Python source without comments and types; every statement stays on its line. No side effects.

    Documentation is cut: docstrings, and the descriptions of variables in `contract.environ.TABLE`, to a dot, the rest
    to nothing.
    """
    import ast  # only needed for the first launch of a version
    import tokenize

    source = _untyped(source)

    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column].rstrip()
    nodes = [*ast.walk(ast.parse(source))]
    after: set[ast.stmt] = set()
    for node in nodes:
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            after.update(node.body[1:])
    for node in nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
            # Of the first something stays: it may be all there is in its block, and dataclasses make one if it is gone.
            lines[first] = (lines[first][: node.col_offset] + '"."' * (node not in after)).rstrip()
            lines[first + 1 : last + 1] = [""] * (last - first)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in TABLE_ROWS:
            doc = node.args[1]
            first, last = doc.lineno - 1, (doc.end_lineno or doc.lineno) - 1
            rest = lines[last].encode("utf-8")[doc.end_col_offset :].decode("utf-8")
            lines[first] = lines[first][: doc.col_offset] + '"."' + (rest if first == last else "")
            lines[first + 1 : last + 1] = [""] * (last - first)
            if first < last:
                lines[last] = rest
    return "\n".join(lines) + "\n"


def _untyped(source: str) -> str:
    """Return Python source without the annotations of parameters, results and variables of functions."""
    import ast

    lines = source.encode("utf-8").splitlines()
    cuts: set[tuple[int, int, int, int]] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.arg) and node.annotation is not None:
            cuts.add((*_at(node, len(node.arg.encode("utf-8"))), *_end(node.annotation)))
        elif isinstance(node, ast.FunctionDef):
            if node.returns is not None:
                row, column = _at(node.returns)
                cuts.add((row, len(lines[row][: lines[row].rindex(b"->", 0, column)].rstrip()), *_end(node.returns)))
            for each in ast.walk(node):
                if isinstance(each, ast.AnnAssign) and each.value is not None:
                    cuts.add((*_end(each.target), *_end(each.annotation)))
    for first, begin, last, end in sorted(cuts, reverse=True):
        rest = lines[last][end:]
        lines[first : last + 1] = [lines[first][:begin], *[b""] * (last - first)]
        lines[last] += rest
    return b"\n".join(lines).decode("utf-8") + "\n"


def _at(node: ast.expr | ast.arg, more: int = 0) -> tuple[int, int]:
    return node.lineno - 1, node.col_offset + more


def _end(node: ast.expr) -> tuple[int, int]:
    return (node.end_lineno or node.lineno) - 1, node.end_col_offset or 0
