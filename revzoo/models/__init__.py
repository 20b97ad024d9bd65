"""The zoo: networks built from the layers, and their registry."""

from revzoo.models.registry import create_model, list_models
from revzoo.models.resnet import RESNETS, ResNet
from revzoo.models.revnet import REVNETS, RevNet
from revzoo.models.staged import StagedNetwork
from revzoo.models.variant import Variant

__all__ = [
    "RESNETS",
    "REVNETS",
    "ResNet",
    "RevNet",
    "StagedNetwork",
    "Variant",
    "create_model",
    "list_models",
]
