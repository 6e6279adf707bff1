"""`distrun completion`: the script by which a shell completes distrun's commands."""

from __future__ import annotations

import os
from pathlib import Path

import click

from distrun.cli.common import say
from distrun.cli.console import print_out
from distrun.completion import FOLDER, SHELLS

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
        say("to use it, type: " + PLACES[shell].format(eval=line), "info")
    print_out(Path(FOLDER, f"distrun.{shell}").read_text(encoding="utf-8"))
    return 0
