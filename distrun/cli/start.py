"""`distrun demo` and `distrun init`: a first job, and a folder with an example that can be changed."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path

import click

from distrun.cli.common import TYPED, say
from distrun.errors import UsageError
from distrun.formats import join, quote

PROGRAM = "train.py"
TORCH = "train_torch.py"
OTHERS = ("job.toml", "hosts")
PYTHON = "python3"
"""How job.toml calls the interpreter."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.pass_context
def demo(ctx: click.Context) -> int:
    """Train a small network on this machine, with 2 workers, 2 servers and a scheduler.

    It takes some seconds and needs no data, no GPU and no network. It is a job as any other: it stays in the list of
    distrun status. It takes no options from pyproject.toml and config.toml. distrun init writes its program, to be
    changed.
    """
    words = ["-n", "2", "-s", "2", "--launcher", "local", "--name", "demo", sys.executable, str(_folder() / PROGRAM)]
    say(f"distrun launch {join(words)}", "info")
    from distrun.cli.launch import launch

    ctx.obj[TYPED] = words
    began = time.monotonic()
    with launch.make_context("demo", list(words), parent=ctx.parent) as inner:
        code = int(launch.invoke(inner))
    if not code:
        took = f"{time.monotonic() - began:.0f} s"
        say(f"2 workers have trained the network in {took}; 2 servers kept its weights. What to type next:", "info")
        _suggest(
            ("distrun status demo", "the job; distrun logs demo: what it printed"),
            ("distrun init my-job", "this program, with a job file and a hosts file"),
            ("distrun launch -h", "options, and more examples"),
        )
    return code


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("directory", metavar="[DIR]", default=".")
@click.option("--torch", "has_torch", is_flag=True, help="The program uses torch; else numpy only.")
def init(directory: str, has_torch: bool) -> None:
    """Write an example to start from into DIR: train.py, job.toml and hosts. [default: the current directory]

    \b
    Examples:
      distrun init my-job && cd my-job && distrun launch -f job.toml

    No file is overwritten: if there is one of these names, nothing is written.
    """
    source, target = _folder(), Path(directory)
    texts = {name: (source / name).read_text("utf-8") for name in OTHERS}
    texts["job.toml"] = texts["job.toml"].replace(json.dumps(PYTHON), json.dumps(_python()), 1)  # not that of hosts
    texts[PROGRAM] = (source / (TORCH if has_torch else PROGRAM)).read_text("utf-8")
    present = [name for name in texts if os.path.lexists(target / name)]
    if present:
        raise UsageError(
            f"{target} has {', '.join(present)} already; nothing was written", "name another folder: distrun init DIR"
        )
    try:
        target.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            with (target / name).open("x", encoding="utf-8") as file:
                file.write(text)
    except OSError as err:
        raise UsageError(f"cannot write {err.filename or target}: {err.strerror}") from err
    say(f"wrote {', '.join(sorted(texts))} in {target.resolve()}. What to type next:", "info")
    first = "distrun launch -f job.toml"
    _suggest(
        (first if target.samefile(".") else f"cd {quote(directory)} && {first}", "here: 2 workers, 2 servers"),
        (f"{first} --profile hosts", "on the hosts of the file hosts"),
    )


def _folder() -> Path:
    """Return the folder of the example: in the package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "start"
    return installed if installed.is_dir() else package.parent / "examples" / "start"


def _python() -> str:
    """Return how the job calls the interpreter that runs distrun: by its name if that finds it, else by its path."""
    found = shutil.which(PYTHON)
    is_here = bool(found) and os.path.dirname(str(found)) == os.path.dirname(sys.executable)
    return PYTHON if is_here and os.path.samefile(str(found), sys.executable) else sys.executable


def _suggest(*lines: tuple[str, str]) -> None:
    width = max(len(command) for command, _ in lines)
    for command, what in lines:
        say(f"  {command:{width}}  # {what}", "info")
