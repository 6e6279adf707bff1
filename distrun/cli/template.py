"""`distrun template`: lists, shows and renders files for other programs, such as a Dockerfile."""

from __future__ import annotations

import click

from distrun import templates
from distrun.cli.console import print_out, render


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def template() -> None:
    """Write the files with which other programs make a cluster: containers, machines, pods.

    \b
    Examples:
      distrun template list
      distrun template show cloud-init
      distrun template render dockerfile > Dockerfile
      distrun template render cloud-init --set user=train --set key="$(cat ~/.ssh/id_ed25519.pub)"
    """


@template.command("list")
def names() -> None:
    """List the templates: name, what each makes, and the program that reads it."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("NAME", no_wrap=True)
    table.add_column("FOR", no_wrap=True)
    table.add_column("WHAT IT MAKES", overflow="fold")
    for each in templates.find_all().values():
        table.add_row(each.name, each.tool, each.what)
    print_out(render(table))


@template.command()
@click.argument("name")
def show(name: str) -> None:
    """Show what a template makes, how to use it, the values that it takes, and its text."""
    found = templates.find(name)
    lines = [f"{found.name}: {found.what}", "", "Use:", *(f"  {line}" for line in found.use), ""]
    lines += ["Values, given by --set NAME=VALUE:" if found.values else "It takes no values.", ""]
    for value in found.values:
        default = "has to be given" if value.default is None else f"default: {value.default or 'empty'}"
        lines += [f"  {value.name}  ({default})", f"      {value.what}"]
        lines += [f"      accepted: {value.accepts}"] if value.accepts else []
    print_out("\n".join(lines).rstrip() + "\n\nText:\n\n" + found.text)


@template.command("render")
@click.argument("name")
@click.option("--set", "given", metavar="NAME=VALUE", multiple=True, help="A value of the template. Repeatable.")
def write(name: str, given: tuple[str, ...]) -> None:
    """Print the file that a template makes; distrun template show NAME lists the values that it takes.

    The first comment of the file tells the version and the values.
    """
    print_out(templates.render(templates.find(name), given))
