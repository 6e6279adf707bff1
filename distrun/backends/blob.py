"""A program of ours as one line of text: everything a host needs, compressed, imported from memory.

There are two programs, the agent and the coordinator; each has its own package and the contract between them. A host
needs nothing but a python3 of at least 3.8. An agent is started as `python -I -c BOOT` and reads its program from
standard input: the first line is the blob, what follows are frames. Nothing has to be quoted but BOOT, which holds no
character that a shell would touch inside single quotes.

The blob has two parts, with a dot between them: the importer with what it has to know, and the modules. Compiling the
modules is a third of an agent's start. So the first agent of a version on a host keeps them compiled in the user's
cache, in a folder that nobody else can write to, and later ones do not unpack the second part. Where the cache cannot
be written, each agent compiles them.

The local backend starts from the same blob; there it carries the files' true names (`origin`), so that tracebacks
and coverage mean the checkout. Docstrings and comments stay at home; line numbers are kept.
"""

from __future__ import annotations

import binascii
import functools
import hashlib
import io
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import distrun_runtime
from distrun import keep

LIMIT = 96 * 1024
"""Bytes of base64. Linux caps one string of an exec at 128 KiB, should the blob ever travel as an argument."""

PACKAGE = "distrun_runtime"


class Program(NamedTuple):
    """What can be sent to a host."""

    packages: tuple[str, ...]
    """Packages of `distrun_runtime` that it consists of."""
    start: str
    """Python source, run when they can be imported. `r` is what came after the blob, `keep` keeps code compiled."""


AGENT = Program(
    ("contract", "agent"),
    """\
from distrun_runtime.agent import guard
gc.enable()
code = guard.serve(r, keep)
sys.stderr.flush()
os._exit(code)  # taking the interpreter down costs 10 ms, in the agent and in its guard
""",
)
COORDINATOR = Program(("contract", "coordinator"), "from distrun_runtime.coordinator import jobrun, service\n")
"""For jobs whose coordinator is not to run where they are launched."""
FILES = ("__init__.py", "errors.py")
TABLE_ROW = "_row"
"""What makes a row of `contract.environ.TABLE`; its fourth argument is for readers."""
LEFT_OUT = ("jobid.py", "jobstore.py")
"""Files of the coordinator that stay at home: jobs are named and found by the machine that launches them."""

BOOT = (
    'exec("import binascii,json,os,sys,zlib\\n'
    "b=bytearray()\\n"
    "while b.find(10)<0:\\n"
    " d=os.read(0,65536)\\n"
    ' if not d:sys.exit(\\"distrun: standard input ended before the agent had arrived\\")\\n'
    " b+=d\\n"
    "l,_,r=bytes(b).partition(bytes([10]))\\n"
    "l,_,s=l.partition(bytes([46]))\\n"
    "m=json.loads(zlib.decompress(binascii.a2b_base64(l)).decode())\\n"
    'exec(m[\\"importer\\"])")'
)
"""Python source of one line: reads the blob from descriptor 0 and runs its importer.

That finds the first part's value in `m`, the second part in `s`, and what came after the blob in `r`.
"""

# Not importlib.abc and friends: they cost 25 ms. No f-strings or the like: an old Python must come to the message.
# `inspect` costs 6 ms and is imported by `dataclasses` for what is not used here; should it be, it is imported then.
# Nothing is collected while modules are imported: there is no garbage, and looking for it costs 2 ms.
IMPORTER = '''\
if sys.version_info < (3, 8):
    sys.exit("distrun: this host's %s is Python %s; the agent needs 3.8 or newer, name one that is"
             % (sys.executable, sys.version.split()[0]))
import gc
gc.disable()
import marshal
from _frozen_importlib_external import MAGIC_NUMBER
from importlib.machinery import ModuleSpec

if "inspect" not in sys.modules:
    late = type(sys)("inspect")
    def load(name):
        if sys.modules.get("inspect") is late:
            del sys.modules["inspect"]
        import inspect
        return getattr(inspect, name)
    late.__getattr__ = load
    sys.modules["inspect"] = late
    import dataclasses
    if sys.modules.get("inspect") is late:
        del sys.modules["inspect"]

cache = os.environ.get("XDG_CACHE_HOME", "")
cache = os.path.join(cache if os.path.isabs(cache) else os.path.join(os.path.expanduser("~"), ".cache"), "distrun")
folder = os.path.join(cache, "agent")
file = os.path.join(folder, m["digest"] + "-" + binascii.hexlify(MAGIC_NUMBER).decode() + ".code")
codes = {}
sources = {}

def is_private(path):
    info = os.lstat(path)
    return info.st_uid == os.geteuid() and not info.st_mode & 18

def mended(path):
    # As agent/cache.py does it: ours to which others can write has nothing in it that is ours and not by us.
    info = os.lstat(path)
    if info.st_mode & 61440 != 16384 or info.st_uid != os.geteuid():
        return False
    if info.st_mode & 18:
        os.chmod(path, info.st_mode & 4095 & ~18)
    return True

def source(name):
    if not sources:
        sources.update(json.loads(zlib.decompress(binascii.a2b_base64(s)).decode()))
    return sources[name]

def compiled(name):
    return compile(source(name), blob.get_filename(name), "exec", dont_inherit=True)

def keep():
    names = m["names"]
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
        if name not in m["names"]:
            return None
        spec = ModuleSpec(name, self, origin=self.get_filename(name), is_package=name in m["packages"])
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
        return name in m["packages"]

    def get_filename(self, name):
        return m["origin"].get(name) or "<distrun>/" + name.replace(".", "/") + ".py"

    def get_source(self, name):
        return source(name)

blob = Blob()
sys.meta_path.insert(0, blob)
'''


def command(python: str) -> tuple[str, ...]:
    """Return the argument list that starts an agent; the line of `build` goes to its standard input first.

    -I: neither the current folder nor PYTHONPATH may put a module of the user's in the agent's way.
    """
    return (python, "-I", "-c", BOOT)


@functools.lru_cache(maxsize=2)
def build(program: Program = AGENT, with_origin: bool = False) -> bytes:
    """Return the blob: one line, newline included.

    Args:
        program: the agent or the coordinator.
        with_origin: name the true files of this machine in tracebacks (it runs here).

    Raises:
        ValueError: it is over LIMIT. A test sees to it that this never reaches a user.
    """
    files = _files(program)
    sources = {name: file.read_text(encoding="utf-8") for name, file in files.items()}
    origin = {name: str(file) for name, file in files.items()} if with_origin else {}
    # Leaving out what need not travel takes a fifth of a second; this very module says how.
    made_from = [program, sources, origin, Path(__file__).read_text(encoding="utf-8")]
    return keep.kept(_digest(made_from), ".blob", lambda: _line(program, sources, origin))


def _files(program: Program) -> dict[str, Path]:
    """Return the modules that travel, by name."""
    root = Path(distrun_runtime.__file__).parent
    found = [(PACKAGE, root / name) for name in FILES]
    for package in program.packages:
        files = sorted((root / package).glob("*.py"))
        found += [(f"{PACKAGE}.{package}", file) for file in files if file.name not in LEFT_OUT]
    return {package if file.name == "__init__.py" else f"{package}.{file.stem}": file for package, file in found}


def _line(program: Program, sources: Mapping[str, str], origin: Mapping[str, str]) -> bytes:
    modules = {name: bare(source) for name, source in sources.items()}
    packages = [PACKAGE, *(f"{PACKAGE}.{package}" for package in program.packages)]
    head = {
        "importer": IMPORTER + program.start,
        "names": list(modules),
        "packages": packages,
        "origin": origin,
        "digest": _digest([modules, origin])[:32],
    }
    line = b".".join(_packed(part) for part in (head, modules))
    if len(line) > LIMIT:
        raise ValueError("the blob is %d bytes, the limit is %d; leave a module out" % (len(line), LIMIT))
    return line + b"\n"


def _packed(value: object) -> bytes:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False).encode("utf-8")
    return binascii.b2a_base64(zlib.compress(text, 9), newline=False)


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode("utf-8")).hexdigest()


def bare(source: str) -> str:
    """Return Python source without comments; every statement stays on its line. Pure.

    Documentation is cut to a dot: docstrings, and what the rows of `contract.environ.TABLE` say of a variable. Lines
    are indented by one blank for each level.
    """
    import ast  # only needed for the first launch of a version
    import tokenize

    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column].rstrip()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
            # Something has to stay: it may be all there is in its block, and without any text dataclasses make one.
            lines[first] = lines[first][: node.col_offset] + '"."'
            lines[first + 1 : last + 1] = [""] * (last - first)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == TABLE_ROW:
            doc = node.args[3]
            first, last = doc.lineno - 1, (doc.end_lineno or doc.lineno) - 1
            rest = lines[last].encode("utf-8")[doc.end_col_offset :].decode("utf-8")
            lines[first] = lines[first][: doc.col_offset] + '"."' + (rest if first == last else "")
            lines[first + 1 : last + 1] = [""] * (last - first)
            if first < last:
                lines[last] = rest
    return _narrow("\n".join(lines) + "\n")


def _narrow(source: str) -> str:
    """Return Python source without comments whose lines are indented as little as possible. Pure."""
    import tokenize

    level = 0
    is_new = True
    levels: dict[int, int] = {}
    inside: set[int] = set()  # a string: its lines stay as they are
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.INDENT, tokenize.DEDENT):
            level += 1 if token.type == tokenize.INDENT else -1
        elif token.type not in (tokenize.NL, tokenize.NEWLINE, tokenize.ENDMARKER):
            if is_new:
                levels[token.start[0] - 1] = level
            inside.update(range(token.start[0], token.end[0]))
        if token.type == tokenize.NEWLINE:
            is_new = True
        elif token.type not in (tokenize.NL, tokenize.INDENT, tokenize.DEDENT):
            is_new = False
    lines = source.splitlines()
    return "".join(
        (line if row in inside else " " * levels.get(row, 0) + line.lstrip(" ")) + "\n"
        for row, line in enumerate(lines)
    )
