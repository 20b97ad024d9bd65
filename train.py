"""Train from the checkout, with the configurations in ``configs/``."""

import sys
from pathlib import Path

import hydra
from omegaconf import DictConfig

from revzoo.cli.commands.resume import asks_to_resume, resume
from revzoo.cli.commands.train import run
from revzoo.cli.config.command_line import check_command_line

CONFIGS = Path(__file__).parent / "configs"


@hydra.main(version_base="1.3", config_path="configs", config_name="train")
def main(cfg: DictConfig) -> None:
    """Train as configured."""
    run(cfg)


if __name__ == "__main__":
    if asks_to_resume(sys.argv[1:]):
        resume(sys.argv[1:], config_dir=CONFIGS)
    else:
        check_command_line(sys.argv[1:], config_dir=CONFIGS)
        main()
