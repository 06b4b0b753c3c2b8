"""The command line: the names of its commands, which load when they are called, and its exit codes."""

from __future__ import annotations

import errno
import importlib
import json
import platform
from collections.abc import Mapping
from importlib.metadata import version as version_of
from typing import Any

import click

import fednl_runtime
from fednl_runtime.errors import FednlError, ModelFileError, RequestError, RulesError, VerificationError

COMMANDS = {
    "serve": "commands.serve:serve",
    "complete": "commands.prompt:complete",
    "chat": "commands.chat:chat",
    "sessions": "commands.sessions:sessions",
    "keys": "commands.keys:keys",
    "doctor": "commands.doctor:doctor",
    "info": "commands.model:info",
    "export": "commands.model:export",
    "quantize": "commands.quantize:quantize",
    "verify": "commands.model:verify",
    "bench": "commands.bench:bench",
    "train": "commands.learn:train",
    "eval": "commands.learn:evaluate",
    "rules": "commands.rules:rules",
    "sync": "commands.sync:sync",
    "aggregator": "commands.aggregator:aggregator",
    "version": "cli:version",
}
"""Where each command lives below this package, in the order of the help."""

EXIT_CODES: Mapping[type[FednlError], int] = {RequestError: 2, ModelFileError: 3, RulesError: 3, VerificationError: 4}
"""Exit codes by error; 0 is success, 1 any other failure, 2 also wrong usage, 130 an interrupt."""
INTERRUPTED = 130

EXTRAS = {"onnx": "export", "torch": "export", "sqlalchemy": "aggregator", "dp_accounting": "aggregator"}
"""The extra that a library comes with, for those that serving does without."""


class LazyGroup(click.Group):
    """A group that imports the module of a command when the command is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names of all commands."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name, None if there is none."""
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name].partition(":")
        command: click.Command = getattr(importlib.import_module(f"{__package__}.{module}"), attribute)
        name_variables(command, cmd_name)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; an error of ours, of the disk, or a missing extra becomes one sentence and an exit code."""
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            if error.name not in EXTRAS:
                raise
            extra = EXTRAS[error.name]
            click.echo(f"Error: This needs {error.name}: pip install 'fednl-runtime[{extra}]'.", err=True)
            ctx.exit(1)
        except FednlError as error:
            click.echo(f"Error: {error}", err=True)
            ctx.exit(next((code for kind, code in EXIT_CODES.items() if isinstance(error, kind)), 1))
        except OSError as error:
            if error.errno == errno.EPIPE:  # nobody reads on: click ends quietly
                raise
            where = f"{error.filename}: " if error.filename else ""
            click.echo(f"Error: {where}{error.strerror or error}. Choose another path or make room there.", err=True)
            ctx.exit(1)
        except KeyboardInterrupt:
            ctx.exit(INTERRUPTED)


def name_variables(command: click.Command, name: str) -> None:
    """Give each option of a command its environment variable, named after the command and the flag.

    The commands of a group share the group's name: those that have a flag in common share its variable.
    """
    for option in command.params:
        if isinstance(option, click.Option):
            flag = max(option.opts, key=len).lstrip("-")
            option.envvar = f"FEDNL_{name}_{flag}".upper().replace("-", "_")
    for part in command.commands.values() if isinstance(command, click.Group) else ():
        name_variables(part, name)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(fednl_runtime.__version__, prog_name="fednl-runtime", message="%(prog)s %(version)s")
def cli() -> None:
    """Language models that learn while they run, on the device they run on.

    Every option can be given as an environment variable, such as FEDNL_SERVE_PORT for serve --port. The commands
    of a group share theirs, such as FEDNL_SESSIONS_SERVER.
    """


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def version(as_json: bool) -> None:
    """Print the versions of this runtime and of what it stands on."""
    versions = {"fednl-runtime": fednl_runtime.__version__, "python": platform.python_version()}
    versions |= {name: version_of(name) for name in ("onnxruntime", "numpy", "tokenizers")}
    click.echo(json.dumps(versions) if as_json else "\n".join(f"{name} {value}" for name, value in versions.items()))


def main() -> None:
    """Run the command line."""
    cli()
