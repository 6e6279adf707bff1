"""`distrun help` and `distrun completion`: texts on topics, the help of commands, scripts for shells.

The help of `launch` shows the options that are used most, or a group.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from distrun import backends
from distrun.cli.console import print_err, print_out
from distrun.completion import FOLDER, SHELLS
from distrun.errors import UsageError
from distrun.options import ENGINES, ROWS, TABLE

COMMON: Mapping[str, tuple[str, ...]] = {
    "Job": ("file", "workers", "servers", "name"),
    "Hosts": ("hostfile", "hosts", "launcher", "placement", "gpus_per_worker"),
    "Code and environment": ("sync_dst_dir", "sync_exclude", "activate", "env", "env_files"),
    "Run and output": ("timeout", "detach", "dry_run", "shows", "quiet", "verbosity"),
}
"""The options that `launch -h` shows."""
ALL = "--help-all"
WIDTH = 26
"""Columns of an option's names at most; longer ones have a line of their own."""

TOPICS = {
    "exit-codes": "What the exit code of a launch means.",
    "hosts": "How hosts are named, and what a hosts file may say.",
    "placement": "Which task runs on which host.",
    "environment": "Variables that tasks get, from you and from distrun.",
    "failures": "What happens if a part of a job fails, and after how long.",
    "output": "What is printed of tasks, and where it is kept.",
}
"""The files of the folder `topics`, which scripts/render-help writes."""


def _groups() -> Mapping[str, Mapping[str, Sequence[str]]]:
    """Return what may stand behind -h: for each word the keys of options by headings."""
    found = {title.lower().replace(" ", "-"): {title: [row.key for row in rows]} for title, rows in TABLE.items()}
    found["engines"] = found.pop("engines")  # last: most users need none of them
    for engine in backends.ENGINES:
        found[engine] = {f"Options for {engine}": [row.key for row in ROWS if row.launchers in (ENGINES, engine)]}
    return found


def of_launch(command: click.Command, ctx: click.Context, typed: Sequence[str]) -> str:
    """Return the help of a command with the options of `launch`, as the words behind its name ask for it.

    Raises:
        UsageError: the word behind -h is nearly the name of a group.
    """
    words = [*typed, ""]
    asked = next((at for at, word in enumerate(words) if word in ctx.help_option_names), -1)
    name = words[asked + 1] if 0 <= asked < len(words) - 1 else ""
    groups = _groups()
    if name and name not in groups and (near := difflib.get_close_matches(name, groups, n=1, cutoff=0.7)):
        raise UsageError(f"-h: there is no group {name!r} of options; did you mean {near[0]}?")
    formatter = ctx.make_formatter()
    command.format_usage(ctx, formatter)
    titles = list(groups)[: len(TABLE)]
    if name not in groups:
        command.format_help_text(ctx, formatter)
    if name in groups:
        shown = groups[name]
    elif words[asked] == ALL:
        shown = {heading: keys for title in titles for heading, keys in groups[title].items()}
    else:
        shown = COMMON
    params = {param.name: param for param in command.params}
    for title, keys in shown.items():
        records = [params[key].get_help_record(ctx) for key in keys if key in params]
        with formatter.section(title):
            formatter.write_dl([record for record in records if record], col_max=WIDTH)
    if shown is COMMON:
        formatter.write_paragraph()
        formatter.write_text(
            f"{ALL} shows all options; -h GROUP those of a group ({', '.join(titles)}) or of an "
            f"engine ({', '.join(backends.ENGINES)})."
        )
    return formatter.getvalue().rstrip("\n")


@click.command("help", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("topic", default="")
@click.pass_context
def explain(ctx: click.Context, topic: str) -> None:
    """Explain TOPIC, or show the help of a command. Without TOPIC, list the topics.

    \b
    Examples:
      distrun help exit-codes
      distrun help kill
    """
    group = ctx.find_root()
    assert isinstance(group.command, click.Group)
    commands = group.command.list_commands(group)
    if not topic:
        formatter = ctx.make_formatter()
        formatter.write_dl(list(TOPICS.items()))
        print_out(formatter.getvalue())
    elif topic in TOPICS:
        print_out(Path(__file__).with_name("topics").joinpath(f"{topic}.txt").read_text("utf-8"))
    elif topic in commands:
        command = group.command.get_command(group, topic)
        assert command is not None
        print_out(command.get_help(click.Context(command, group, topic, **command.context_settings)) + "\n")
    else:
        near = difflib.get_close_matches(topic, [*TOPICS, *commands], n=1)
        raise UsageError(
            f"there is no topic {topic!r}; " + (f"did you mean {near[0]}?" if near else f"topics: {', '.join(TOPICS)}"),
            "distrun help lists the topics, distrun -h the commands",
        )


# `distrun completion`: the script by which a shell completes distrun's commands.


PLACES = {
    "bash": "distrun completion bash > ~/.local/share/bash-completion/completions/distrun  # or in ~/.bashrc: {eval}",
    "zsh": "distrun completion zsh > ~/.zfunc/_distrun  # or in ~/.zshrc, below compinit: {eval}",
    "fish": "distrun completion fish > ~/.config/fish/completions/distrun.fish",
}
"""By shell: what to type so that it completes from now on."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> int:
    """Print the script by which a shell completes options, jobs, tasks and hosts.

    \b
    Examples:
      eval "$(distrun completion bash)"      # in ~/.bashrc
      eval "$(distrun completion zsh)"       # in ~/.zshrc, below compinit
      distrun completion fish > ~/.config/fish/completions/distrun.fish
    """
    if os.isatty(1):
        line = f'eval "$(distrun completion {shell})"'
        print_err(f"distrun: to use it, type: {PLACES[shell].format(eval=line)}\n")
    print_out(Path(FOLDER, f"distrun.{shell}").read_text(encoding="utf-8"))
    return 0
