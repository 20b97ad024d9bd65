"""``python -m revzoo``: the program ``revzoo``."""

from revzoo.cli.main import main

if __name__ == "__main__":
    main()
