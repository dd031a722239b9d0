"""`braintrace completion`: print a script for tab completion of commands, options and names."""

from __future__ import annotations

import argparse
from argparse import Namespace
from typing import TYPE_CHECKING

from .options import RULES, add_command, path

if TYPE_CHECKING:
    from .options import Commands

ABOUT = """\
Print a script for tab completion.

examples:
  eval "$(braintrace completion bash)"                                 in ~/.bashrc
  eval "$(braintrace completion zsh)"                                  in ~/.zshrc
  braintrace completion fish > ~/.config/fish/completions/braintrace.fish
"""


def add_to(commands: Commands) -> None:
    parser = add_command(commands, "completion", "print a script for tab completion", ABOUT, run)
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))


def run(given: Namespace) -> int:
    from .main import make_parser

    found = [a for a in make_parser()._actions if isinstance(a, argparse._SubParsersAction)]
    commands: dict[str, argparse.ArgumentParser] = dict(found[0].choices)
    helps = {a.dest: a.help or "" for a in found[0]._choices_actions}
    print(fish(commands, helps) if given.shell == "fish" else bash(commands, zsh=given.shell == "zsh"))
    return 0


def _options(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [a for a in parser._actions if a.option_strings]


def _choices(action: argparse.Action) -> list[str]:
    """Return the possible values of an option or argument."""
    if action.dest == "task":
        from .. import tasks

        return tasks.names()
    if action.dest in ("rule", "rules"):
        return RULES
    return [str(c) for c in action.choices or ()]


def _words(parser: argparse.ArgumentParser) -> list[str]:
    named = [o for a in _options(parser) for o in a.option_strings if o.startswith("--")]
    return [*named, *(c for a in parser._actions if not a.option_strings for c in _choices(a))]


def bash(commands: dict[str, argparse.ArgumentParser], zsh: bool) -> str:
    """Return one shell function, which zsh runs through `bashcompinit`."""
    choices: dict[str, list[str]] = {}
    for parser in commands.values():
        for action in _options(parser):
            if found := _choices(action):
                known = choices.setdefault("|".join(o for o in action.option_strings), [])
                known += [c for c in found if c not in known]
    lines = ["autoload -U +X bashcompinit && bashcompinit"] if zsh else []
    lines += [
        "_braintrace() {",
        '  local cur="${COMP_WORDS[COMP_CWORD]}" prev="${COMP_WORDS[COMP_CWORD-1]}" words=""',
        '  case "$prev" in',
        *(f'    {option}) words="{" ".join(found)}" ;;' for option, found in choices.items()),
        "  esac",
        '  if [ -z "$words" ]; then case "${COMP_WORDS[1]}" in',
        *(f'    {name}) words="{" ".join(_words(p))}" ;;' for name, p in commands.items()),
        "  esac; fi",
        f'  if [ "$COMP_CWORD" -eq 1 ]; then words="{" ".join(commands)} --help --version"; fi',
        '  COMPREPLY=($(compgen -W "$words" -- "$cur"))',
        "}",
        "complete -o default -F _braintrace braintrace",
    ]
    return "\n".join(lines)


def fish(commands: dict[str, argparse.ArgumentParser], helps: dict[str, str]) -> str:
    quote = lambda text: "'" + text.replace("\\", "\\\\").replace("'", "\\'").replace("%%", "%") + "'"
    lines = ["complete -c braintrace -f"]
    for name, parser in commands.items():
        lines.append(f"complete -c braintrace -n __fish_use_subcommand -a {name} -d {quote(helps[name])}")
        seen = f"-n '__fish_seen_subcommand_from {name}'"
        for action in parser._actions:
            found = _choices(action)
            words = f" -x -a {quote(' '.join(found))}" if found else ""
            if action.type is path:
                words = " -r -F"
            elif action.option_strings and action.nargs != 0 and not words:
                words = " -x"
            longs = [o[2:] for o in action.option_strings if o.startswith("--")]
            option = "".join(f" -l {o}" for o in longs)
            if option or words:
                lines.append(f"complete -c braintrace {seen}{option}{words} -d {quote(action.help or '')}")
    return "\n".join(lines)
