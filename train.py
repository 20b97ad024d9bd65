"""Train from the checkout: ``python train.py ...`` is ``revzoo train ...``."""

import sys

from revzoo.cli.main import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
