"""The command lines of rsync. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from distrun.sync.tool import Tool


def base(tool: Tool) -> list[str]:
    """Return the program and how files are copied: links as links, with times; never owner and group.

    Files belong to whoever logs in on the host. Of modes only executability is carried over to files that are there:
    the modes of existing folders are the host's business (a group's shared folder, a set-group-id bit).
    """
    argv = [tool.program, "-rlt"]
    argv.append("--executability" if tool.has("--executability") else "-p")
    return argv + _known(tool, "--omit-dir-times", "--8-bit-output")


def listing(tool: Tool, filters: Sequence[str], source: str, empty: str, files_from: str = "") -> list[str]:
    """Return the command that says what a copy of `source` into the folder `empty` would bring, and does nothing."""
    argv = [*base(tool), "--dry-run", *filters, *_from(files_from)]
    # As for the copy: then rsync knows all entries before it begins, and takes them in the same order.
    argv += _known(tool, "--delay-updates")
    argv.append("--out-format=%l %i %n" if tool.has("--out-format") else "--stats")
    return [*argv, "--", source, empty]


def sending(
    tool: Tool,
    filters: Sequence[str],
    source: str,
    host: str,
    *,
    shell: Sequence[str],
    rsync_path: str,
    partial: str,
    stall_s: float,
    delete: bool = False,
    files_from: str = "",
    follow: bool = False,
) -> list[str]:
    """Return the command that copies `source` to `host`, into the folder that `rsync_path` changes into.

    Files come into place when all have arrived. `follow`: what links lead to is copied, not the links.
    """
    argv = [*base(tool), "--rsh=" + join(shell), "--rsync-path=" + rsync_path, "--timeout=%d" % max(1, round(stall_s))]
    if tool.has("--delay-updates", "--partial-dir"):
        argv += ["--delay-updates", "--partial-dir=" + partial]
    if delete:
        # Deletions come last, so that a copy that fails has deleted nothing.
        argv += ["--delete", *(_known(tool, "--delete-delay") or ["--delete-after"])]
    argv += [*filters, *_from(files_from), "--stats"]
    if follow:
        argv.append("--copy-links")
    if tool.has("--info"):
        argv.append("--info=progress2")
    return [*argv, "--", source, "%s:./" % ("[%s]" % host if ":" in host else host)]


def join(words: Sequence[str]) -> str:
    """Return words as --rsh takes them: rsync splits at blanks and knows quotes (doubled within themselves)."""
    return " ".join(_quoted(word) for word in words)


def _quoted(word: str) -> str:
    if word and not any(character in word for character in " '\""):
        return word
    return "'%s'" % word.replace("'", "''")


def _from(path: str) -> list[str]:
    return ["--from0", "--files-from=" + path] if path else []


def _known(tool: Tool, *names: str) -> list[str]:
    return [name for name in names if tool.has(name)]
