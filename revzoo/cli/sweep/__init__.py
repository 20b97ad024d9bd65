"""Hyper-parameter search by optuna, over runs of ``revzoo train``."""
