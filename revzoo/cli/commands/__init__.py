"""The subcommands of the program, one per file."""
