"""What happens on a host before its rsync starts: one shell text, which rsync runs there in place of `rsync`. Pure.

It makes the folder, changes into it, checks what can be checked without the agent (why the agent has the same rules is
said in distrun_runtime/agent/places.py), and says what it finds in lines
`distrun-sync: WORD DETAIL` on stderr. rsync is then told to write to `./`, so that no path of the user's is ever
parsed by a shell: the folder travels as an argument of the text, in octal where it is not plain.
"""

from __future__ import annotations

import os
import re

from distrun.errors import UsageError
from distrun.sync.rules import PARTIAL
from distrun_runtime.contract.folder import MARKER

SAYS = "distrun-sync: "

BEGIN = "begin"
SAME = "same"
NO_RSYNC = "norsync"
NO_USER = "nouser"
NO_FOLDER = "nofolder"
NOT_WRITABLE = "notwritable"
UNMARKED = "unmarked"
FULL = "full"

# No single quote, exclamation mark, backslash or newline: the user's login shell (also csh and fish) reads this
# between single quotes. $1 folder, $2 KiB needed, $3 identity of the source, $4 1: delete, x: an extra, $5 name of
# partial folders. Each run has its own, so that two runs into one folder do not take each other's files. While a run
# lasts, there is a folder of that name and ".on"; one that is older than a day tells of a run that was killed.
_TEXT = (
    'say() { echo "%(says)s$*" >&2; }; say %(begin)s; '
    'd=$(printf %%b "$1"; echo x); d=${d%%x}; need=$2; source=$3; delete=$4; part=$5; shift 5; '
    'case $d in "~") d=$HOME;; "~/"*) d=$HOME/${d#"~/"};; '
    '"~"*) u=${d%%%%/*}; eval "h=$u"; case $h in /*) ;; *) say %(nouser)s "$u"; exit 3;; esac; d=$h${d#"$u"};; '
    "/*) ;; *) d=$HOME/$d;; esac; "
    '[ -d "$d" ] || mkdir -p -- "$d" || { say %(nofolder)s "$d"; exit 11; }; '
    'cd -- "$d" || { say %(nofolder)s "$d"; exit 11; }; '
    'if [ -n "$source" ]; then '
    'i="$(stat -c %%d:%%i . 2>/dev/null) $(cat /proc/sys/kernel/random/boot_id 2>/dev/null)"; '
    '[ "$i" = "$source" ] && { say %(same)s; exit 0; }; fi; '
    "PATH=$PATH:/usr/local/bin:/opt/homebrew/bin; "
    "command -v rsync >/dev/null 2>&1 || { say %(norsync)s; exit 127; }; "
    '[ -w . ] || { say %(notwritable)s "$d"; exit 11; }; '
    'if [ -z "$(ls -A)" ]; then '
    "k=$(df -Pk . 2>/dev/null | { read -r x; read -r a b c k x; echo $k; }); "
    '[ "$k" -ge 0 ] 2>/dev/null && { [ "$k" -ge "$need" ] || { say %(full)s "$k" "$d"; exit 11; }; }; '
    "case $delete in x) ;; *) : >%(marker)s || exit 11;; esac; fi; "
    'if [ "$delete" = 1 ]; then [ -e %(marker)s ] || { say %(unmarked)s "$d"; exit 4; }; fi; '
    'for o in %(partial)s*.on; do [ -d "$o" ] && [ -n "$(find "$o" -prune -mtime +0)" ] && '
    '{ find . -type d -name "${o%%%%.on}" -prune -exec rm -rf {} +; rmdir "$o"; }; done 2>/dev/null; '
    # Whatever signal ends rsync: what has arrived of a copy that failed is not left there.
    'trap : HUP INT TERM; mkdir "$part.on" 2>/dev/null; rsync "$@"; c=$?; '
    '[ $c = 0 ] || find . -type d -name "$part" -prune -exec rm -rf {} +; rmdir "$part.on" 2>/dev/null; exit $c'
) % {
    "says": SAYS,
    "begin": BEGIN,
    "same": SAME,
    "norsync": NO_RSYNC,
    "nouser": NO_USER,
    "nofolder": NO_FOLDER,
    "notwritable": NOT_WRITABLE,
    "unmarked": UNMARKED,
    "full": FULL,
    "marker": MARKER,
    "partial": PARTIAL,
}


def rsync_path(
    folder: str, *, size: int = 0, source: str = "", delete: bool = False, extra: bool = False, partial: str = "-"
) -> str:
    """Return the value of --rsync-path.

    `folder` is the destination: `~` and `~user` are the host's, another relative path is below the home folder.
    `size` (bytes) has to be free if the folder is empty. `source` is `folder.identity()` of what is copied; empty: no
    look whether it is the same folder. `delete`: only with the marker. `extra`: a folder below the destination, which
    gets no marker.
    """
    words = [encode(folder), str((size + 1023) // 1024), source, "x" if extra else "1" if delete else "0", partial]
    return "sh -c '%s' distrun-sync %s" % (_TEXT, " ".join("'%s'" % word for word in words))


def check_folder(folder: str, option: str = "--sync-dst-dir") -> None:
    """Check a destination. Pure.

    Raises:
        UsageError: it is empty, the root of the file system, or names a user or variable as only a shell would read it.
    """
    if not folder or "\0" in folder:
        raise UsageError("%s: expected a directory on the hosts, found %r" % (option, folder))
    if folder.startswith("~") and not re.fullmatch(r"~[A-Za-z0-9._+-]*(/.*)?", folder, re.DOTALL):
        raise UsageError("%s: expected ~/DIR or ~USER/DIR, found %r" % (option, folder), "./%s is a name" % folder)
    if folder.startswith("$"):
        home = re.sub(r"\A\$(HOME|\{HOME\})(?=/|\Z)", "~", folder)
        fix = "write %s" % home if home != folder else "./%s is a name" % folder
        raise UsageError("%s: variables are not expanded on the hosts: %r" % (option, folder), fix)
    if not folder.strip("/."):
        raise UsageError("%s: %r is no directory for copies" % (option, folder), "name one of its own, like /tmp/job")


def encode(folder: str) -> str:
    """Return a path as `printf %b` reads it: plain characters as they are, all others in octal. Pure."""
    plain = re.compile(rb"[A-Za-z0-9_./~+,:@=-]")
    parts = [bytes([byte]) for byte in os.fsencode(folder)]
    return "".join(part.decode() if plain.match(part) else "\\0%03o" % part[0] for part in parts)
