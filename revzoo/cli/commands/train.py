"""Train a model, or resume a run.

  revzoo train model=revnet38 data=cifar10 trainer.max_epochs=30

Arguments are overrides of the configuration in configs/train.yaml, in Hydra's grammar:
  model=NAME data=NAME ...    choose an option of a group, see below
  optim.lr=0.1                set a value; --optim.lr 0.1 means the same
  +model.units=[1,1,1]        add a keyword that the section knows
  -m seed=0,1,2               several runs, one after the other

revzoo options GROUP shows every option of a group with its comment; try revzoo options callbacks.

revzoo train --resume RUN_DIR continues a run in its folder with its configuration; --resume last
the newest run below outputs, --resume DIR the newest below DIR. Only these may change: memory=MODE,
with memory.bytes=BUDGET or memory.fraction=PART; data.root=DIR; data.table=FILE; data.endpoint_url;
trainer.accelerator=cpu, gpu or auto; trainer.cuda_graph; data.on_device; data.num_workers;
trainer.devices, trainer.num_nodes and data.batch_size, if their product stays; precision=NAME with
--allow-precision-change; and trainer.max_epochs=N or trainer.max_steps=N, which train longer.

revzoo train --auto-resume hydra.run.dir=RUN_DIR ... begins a run, or resumes it if the folder holds
it: a program that is started again, by torchrun or SLURM, repeats its command.

NOTE [ The order of checks ]
1. Compose and check the configuration, without torch.
2. Check the machine, without Lightning.
3. Lock the run's folder.
4. Build the parts: trainer, data and model, each once. Constructors check values and combinations.
5. Read the images; only then write files.
A run that cannot work ends with one or two lines and status 1, and leaves no files.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from revzoo._files import check_writable
from revzoo.cli.terminal import ConfigError, override_argument, status_of

if TYPE_CHECKING:  # Hydra is imported when the command runs, not for its help
    from omegaconf import DictConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments: Hydra's, and a resumed run's."""
    add = parser.add_argument
    help_text = "overrides of the configuration"
    add("overrides", nargs="*", type=override_argument, metavar="KEY=VALUE", help=help_text)
    add("--resume", type=Path, metavar="RUN_DIR", help="continue a run in its folder; or last")
    add("--auto-resume", action="store_true", help="begin, or resume the run in hydra.run.dir")
    add("--allow-precision-change", action="store_true", help="with --resume and precision=NAME")
    add("--multirun", "-m", action="store_true", help="a run for each combination of the values")
    add("--cfg", "-c", choices=("job", "hydra", "all"), help="print the configuration and exit")
    add("--resolve", action="store_true", help="with --cfg: references resolved")
    add("--package", "-p", metavar="SECTION", help="with --cfg: only this section")
    add("--config-dir", "-cd", type=Path, metavar="DIR", help="a further folder of options")
    add("--config-name", "-cn", metavar="NAME", help="the primary file (default train)")
    add("--config-path", "-cp", metavar="DIR", help="the folder of the primary file and the groups")


def epilog() -> str:
    """The groups of options, for the help."""
    from revzoo.cli.commands.options import groups

    # argparse wraps its own text, not an epilog
    return "\n".join(["groups:", *groups(margin=2)])


def run(args: argparse.Namespace) -> None:
    """Train, resume, or print information, by the arguments."""
    if args.resume is not None:
        _check_resumed(args)
        _resume(args.resume, args.overrides, allow=args.allow_precision_change)
        return
    from revzoo.cli.config import ConfigFiles, check_machine, check_root, compose, without_hydra
    from revzoo.cli.schema import CONFIGS

    folder = CONFIGS if args.config_path is None else Path(args.config_path)
    source = ConfigFiles(args.config_name or "train", folder=folder, extra=args.config_dir)
    if args.multirun and args.cfg:
        raise ConfigError("--cfg prints the configuration of one run: leave out -m")
    if args.multirun and args.auto_resume:
        raise ConfigError("--auto-resume continues one run: leave out -m")
    if args.multirun:
        from revzoo.cli.run.multirun import multirun

        multirun(args.overrides, source)
        return
    config, whole = compose(args.overrides, source, complete=args.cfg is None)
    if args.cfg is not None:
        parts = {"all": whole, "hydra": whole.hydra, "job": without_hydra(whole)}
        _print(parts[args.cfg], args)
        return
    check_root(config["data"])
    from revzoo.cli.run.folder import CONFIG_FILE, check_repeated, check_unused, dir_of, is_timed

    run_dir = dir_of(whole.hydra.run)
    if args.auto_resume:
        if is_timed(whole.hydra.run):
            raise ConfigError("--auto-resume: add hydra.run.dir=RUN_DIR, the folder to resume from")
        if (run_dir / CONFIG_FILE).exists():
            check_repeated(run_dir, args.overrides)
            _resume(run_dir)
            return
    check_writable(run_dir / CONFIG_FILE, makes_folders=True)
    if not is_timed(whole.hydra.run):  # a name with the time is new
        check_unused(run_dir)
    with status_of("loading torch and Lightning"):
        check_machine(config)  # before Lightning is imported
        from revzoo.cli.run.train import begin

    begin(config, whole, overrides=args.overrides)


def _check_resumed(args: argparse.Namespace) -> None:
    new_runs = ["auto_resume", "multirun", "cfg", "resolve", "package"]
    new_runs += ["config_dir", "config_name", "config_path"]
    if excess := [name for name in new_runs if getattr(args, name)]:
        raise ConfigError(
            f"--resume with --{excess[0].replace('_', '-')}: a resumed run has its configuration "
            "in its folder; leave the option out"
        )


def _resume(run_dir: Path, overrides: Sequence[str] = (), *, allow: bool = False) -> None:
    from revzoo.cli.config import check_machine
    from revzoo.cli.run.folder import CONFIG_FILE, errors_naming, newest_run, resumed_config

    run_dir = newest_run(run_dir)
    config = resumed_config(run_dir, overrides, allow_precision_change=allow)
    check_writable(run_dir / CONFIG_FILE)
    with status_of("loading torch and Lightning"), errors_naming(run_dir / CONFIG_FILE):
        check_machine(config)  # before Lightning is imported
        from revzoo.cli.run.train import resume

    resume(run_dir, config, overrides)


def _print(cfg: DictConfig, args: argparse.Namespace) -> None:
    from omegaconf import Container, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        part = cfg if args.package in (None, "_global_") else OmegaConf.select(cfg, args.package)
    except OmegaConfBaseException:
        # a missing key, or a section with references that cannot be resolved
        part = None
    if part is None:
        raise ConfigError(f"--package {args.package}: expected a section of the configuration")
    if args.resolve and isinstance(part, Container):
        OmegaConf.resolve(part)
    sys.stdout.write(OmegaConf.to_yaml(part) if isinstance(part, Container) else f"{part}\n")
