"""The zoo: networks built from the layers, and their registry."""

from revzoo.models.features import FeatureNet
from revzoo.models.network import FeatureInfo, ImageNetwork
from revzoo.models.registry import create_model, from_pretrained, list_models
from revzoo.models.resnet import RESNETS, ResNet
from revzoo.models.revnet import REVNETS, RevNet
from revzoo.models.staged import StagedNetwork
from revzoo.models.variant import Variant

__all__ = [
    "RESNETS",
    "REVNETS",
    "FeatureInfo",
    "FeatureNet",
    "ImageNetwork",
    "ResNet",
    "RevNet",
    "StagedNetwork",
    "Variant",
    "create_model",
    "from_pretrained",
    "list_models",
]
