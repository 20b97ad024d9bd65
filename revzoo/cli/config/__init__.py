"""The configuration: composing it, checking it, and building the parts of a run.

* ``compose``: Hydra makes one configuration of the files and a command line.
* ``overrides``: refuses unknown keys and options, and suggests the nearest ("did you mean").
* ``quick``: checks values without Lightning. ``signatures`` reads options from source files.
* ``checks``: runs all checks, and builds the object that each section describes.
* ``build``: builds the Trainer, the data, the module and the loggers.
* ``yaml_files``: reads and writes ``config.yaml``.
* ``errors``: ends the program with an error's message.
"""
