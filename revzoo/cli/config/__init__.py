"""The configuration: what may be set, and composing it.

* ``schema``: every option with its type, range, choices and meaning. ``check`` compares values.
* ``config``: Hydra makes one checked configuration of the files and a command line.
* ``spellings``: options as other programs spell them.
* ``yaml_files``: reads and writes ``config.yaml``.
* ``errors``: ends the program with an error's message.
"""
