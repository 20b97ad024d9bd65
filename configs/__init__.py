"""The Hydra configurations; installed as ``revzoo.configs``."""
