"""Train from the checkout, with the configurations in ``configs/``; see ``revzoo/cli/train.py``."""

import sys
from pathlib import Path

import hydra
from omegaconf import DictConfig

from revzoo.cli.train import check_command_line, run


@hydra.main(version_base="1.3", config_path="configs", config_name="train")
def main(cfg: DictConfig) -> None:
    """Train as configured."""
    run(cfg)


if __name__ == "__main__":
    check_command_line(sys.argv[1:], config_dir=Path(__file__).parent / "configs")
    main()
