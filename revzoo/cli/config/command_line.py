"""Refuses a command line of ``revzoo-train`` before Hydra makes a folder, or writes into one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hydra._internal.utils import get_args_parser

from revzoo.cli.config.checks import check_config
from revzoo.cli.config.overrides import check_hydra, check_sweep, compose_checked, to_plain
from revzoo.cli.run.errors import told_plainly
from revzoo.cli.run.folder import CONFIG_FILE, check_unused
from revzoo.cli.run.lock import locked
from revzoo.cli.run.multirun import check_started_together


def check_command_line(arguments: Sequence[str], *, config_dir: Path | None = None) -> None:
    """Refuse a command line that cannot be run, before Hydra makes a folder for the run.

    Args:
        arguments: the command line without the program's name.
        config_dir: folder of the configurations; None for the installed ones.

    Raises:
        SystemExit: with a message that names the nearest valid key or option.
    """
    args = get_args_parser().parse_args(list(arguments))
    own_config = args.config_path or args.config_name or args.config_dir
    if own_config or args.help or args.hydra_help or args.info or args.shell_completion:
        with told_plainly():
            check_hydra(args.overrides)
        return  # other configurations or no run: the configuration is checked when it is used
    with told_plainly():
        check_started_together(args.overrides, several=args.multirun)
        if args.multirun:
            check_sweep(args.overrides, config_dir=config_dir)
        else:
            check_folder(args.overrides)
            check_config(to_plain(compose_checked(args.overrides, config_dir=config_dir)))


def check_folder(overrides: Sequence[str]) -> None:
    """Refuse the folder of another run, as soon as the command line names it.

    Hydra writes the new command's record into the folder before :func:`run` is called.

    Raises:
        ConfigError: the folder holds a run.
        SystemExit: another program is at work there.
    """
    for override in overrides:
        key, _, value = override.partition("=")
        folder = Path(value.strip("'\""))
        if key == "hydra.run.dir" and (folder / CONFIG_FILE).exists():
            with locked(folder):
                check_unused(folder)
