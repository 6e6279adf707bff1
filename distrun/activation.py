"""--activate and --setup: one text for `bash -l`, run once on each host before tasks start. No side effects.

The environment that the text leaves is what tasks start from. The text ends with another code than 0, and one line
on stderr that says which word failed and why, when a step fails; the steps after it do not run.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence

from distrun.errors import UsageError
from distrun.formats import quote

KINDS = ("venv", "conda", "module")

_HEAD = """\
__distrun_fail() { printf 'distrun: %s: %s\\n' "$1" "$2" >&2; exit 1; }
"""
_TAIL = "unset -f __distrun_fail\n"

_SNIPPET = """\
eval @TEXT@ || __distrun_fail @WORD@ "it ended with code $?"
"""

_VENV = """\
__distrun_at=@PATH@
if [ ! -r "$__distrun_at/bin/activate" ]; then
    __distrun_fail @WORD@ "there is no $__distrun_at/bin/activate on this host"
fi
. "$__distrun_at/bin/activate" || __distrun_fail @WORD@ "its bin/activate ended with code $?"
if ! "$__distrun_at/bin/python" -c '' >/dev/null 2>&1; then
    __distrun_fail @WORD@ "$__distrun_at/bin/python does not run here (a copy of another machine's environment?)"
fi
unset __distrun_at
"""

_CONDA = """\
__distrun_conda=''
for __distrun_at in "$CONDA_EXE" "$(type -P conda)" \\
    "$HOME"/{miniforge3,miniconda3,mambaforge,anaconda3,conda}/bin/conda \\
    {/opt,/usr/local}/{conda,miniforge3,miniconda3,mambaforge,anaconda3}/bin/conda; do
    if [ -n "$__distrun_at" ] && [ -x "$__distrun_at" ]; then __distrun_conda=$__distrun_at; break; fi
done
if [ -z "$__distrun_conda" ]; then
    __distrun_fail @WORD@ 'there is no conda on PATH, in CONDA_EXE, in the home folder, /opt or /usr/local of this host'
fi
__distrun_at=$("$__distrun_conda" shell.bash hook) || __distrun_fail @WORD@ "$__distrun_conda shell.bash hook failed"
eval "$__distrun_at"
conda activate @PATH@ || __distrun_fail @WORD@ "conda activate ended with code $?"
unset __distrun_conda __distrun_at
"""

# Old versions of `module load` end with 0 when they fail: then nothing was added to the loaded ones.
_MODULE = """\
if [ "$(type -t module)" != function ]; then
    for __distrun_at in "$MODULESHOME/init/bash" "$LMOD_PKG/init/bash" \\
        /etc/profile.d/{modules,lmod,z00_lmod,z00-lmod}.sh /usr/share/{lmod/lmod,modules,Modules}/init/bash \\
        /usr/local/{lmod/lmod,Modules}/init/bash /opt/{apps/lmod/lmod,cray/pe/modules/default}/init/bash; do
        if [ -r "$__distrun_at" ]; then . "$__distrun_at"; fi
        if [ "$(type -t module)" = function ]; then break; fi
    done
fi
if [ "$(type -t module)" != function ]; then
    __distrun_fail @WORD@ 'this host has no command `module`, and no init file of it where those usually are'
fi
__distrun_at=$LOADEDMODULES
module load @PATH@ || __distrun_fail @WORD@ "module load ended with code $?"
case ":$LOADEDMODULES:" in
    ":$__distrun_at:")
        case ":$LOADEDMODULES:" in
            *:@PATH@:* | *:@PATH@/*) ;;
            *) __distrun_fail @WORD@ 'module load did not load it' ;;
        esac ;;
esac
unset __distrun_at
"""


def script(words: Sequence[str], cwd: str = "", setup: str = "") -> str:
    """Return the text that does what all words of --activate say, in their order, then `setup`. No side effects.

    It is empty if there is nothing to do.

    `venv:PATH`, `conda:ENV` (a name or a path), `module:NAME`, or any shell text. `~` is the host's home folder;
    other relative paths are below `cwd`, or, if that is empty, below the folder in which the text runs.

    Raises:
        UsageError: a word that is empty, or of a kind that does not exist.
    """
    steps = [_step(word, cwd) for word in words]
    if setup:
        steps.append(_fill(_SNIPPET, "--setup", quote(setup)))
    return _HEAD + "".join(steps) + _TAIL if steps else ""


def folders(words: Sequence[str]) -> tuple[str, ...] | None:
    """Return the folders of environments that words of --activate name, as typed. No side effects.

    None: a word is shell text, so that its needs are unknown. Modules and conda's environments have names, and
    are on a host before any file is copied there.
    """
    found: list[str] = []
    for word in words:
        kind, colon, value = word.partition(":")
        if not colon or kind not in KINDS:
            return None
        value = value.strip()
        if kind == "venv" or (kind == "conda" and ("/" in value or value == "~")):
            found.append(value)
    return tuple(found)


def _step(word: str, cwd: str) -> str:
    if not word.strip() or "\0" in word:
        raise UsageError(f"--activate: expected {_forms()} or shell text, found {word!r}")
    given = f"--activate {_shown(word)}"
    match = re.fullmatch(r"([A-Za-z][\w-]*):(\S.*|)", word)
    if match is None or (match.group(1) not in KINDS and re.search(r"\s", word)):
        return _fill(_SNIPPET, given, quote(word))
    kind, value = match.group(1), match.group(2).rstrip()
    if kind not in KINDS:
        import difflib  # for a mistake only

        near = difflib.get_close_matches(kind, KINDS, n=1)
        raise UsageError(
            f"--activate: expected {_forms()} or shell text, found {word!r}",
            f"did you mean {near[0]}:{value}?" if near else "",
        )
    if not value or value.startswith("-"):
        raise UsageError(f"--activate {word}: expected {_FORMS[kind]}")
    if kind == "venv":
        return _fill(_VENV, given, _path(value, cwd))
    if kind == "conda":
        return _fill(_CONDA, given, _path(value, cwd) if "/" in value or value == "~" else quote(value))
    return "".join(_fill(_MODULE, f"--activate module:{name}", quote(name)) for name in value.split())


_FORMS = {
    "venv": "venv:PATH, the folder of a virtual environment",
    "conda": "conda:ENV, the name or the folder of an environment",
    "module": "module:NAME, what `module load` takes",
}


def _forms() -> str:
    return ", ".join(f"{kind}:..." for kind in KINDS)


def _fill(template: str, given: str, value: str) -> str:
    values = {"@WORD@": quote(given), "@PATH@": value, "@TEXT@": value}
    # In one pass: what is filled in is never looked through.
    return re.sub("@WORD@|@PATH@|@TEXT@", lambda found: values[found.group(0)], template)


def _path(value: str, cwd: str) -> str:
    """Return a path for bash; a `~` in front is left to the shell of the host."""
    match = re.fullmatch(r"(~[\w.+-]*/?)(.*)", value, re.DOTALL)
    if match is not None and (match.group(1).endswith("/") or not match.group(2)):
        return match.group(1) + (quote(match.group(2)) if match.group(2) else "")
    return quote(posixpath.join(cwd, value) if cwd else value)


def _shown(word: str) -> str:
    line = " ".join(word.split())
    return line if len(line) <= 60 else line[:57] + "..."
