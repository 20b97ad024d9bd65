"""Hyper-parameter search.

* ``command``: the subcommand.
* ``space``: the ranges of the overrides.
* ``spec``: the sweep's options, recorded in its folder.
* ``search``: proposes and runs trials, resumes interrupted ones.
* ``results``: figures of the trials, tables, the best command.
"""
