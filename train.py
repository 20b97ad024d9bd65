"""Train from the checkout: ``python train.py ...`` is ``revzoo train ...``."""

import sys
from importlib.util import find_spec

if __name__ == "__main__":
    if not (find_spec("torch") and find_spec("hydra")):  # not the installed Python
        sys.exit(
            f"revzoo: {sys.executable} lacks revzoo's packages: run '. .venv/bin/activate' after "
            "'make train', or 'pip install -e .'"
        )
    from revzoo.cli.main import main

    main(["train", *sys.argv[1:]])
