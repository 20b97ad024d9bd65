"""The zoo: networks built from the layers, and their registry."""

from revzoo.models.features import FeatureNet
from revzoo.models.irevnet import IREVNETS, IRevNet, IRevNetVariant
from revzoo.models.network import FeatureInfo, ImageNetwork
from revzoo.models.registry import create_model, from_pretrained, list_models
from revzoo.models.resnet import RESNETS, ResNet
from revzoo.models.revnet import REVNETS, RevNet
from revzoo.models.revvit import REVVITS, VITS, RevViT, RevViTVariant, ViT
from revzoo.models.staged import StagedNetwork
from revzoo.models.variant import Variant

__all__ = [
    "IREVNETS",
    "RESNETS",
    "REVNETS",
    "REVVITS",
    "VITS",
    "FeatureInfo",
    "FeatureNet",
    "IRevNet",
    "IRevNetVariant",
    "ImageNetwork",
    "ResNet",
    "RevNet",
    "RevViT",
    "RevViTVariant",
    "StagedNetwork",
    "Variant",
    "ViT",
    "create_model",
    "from_pretrained",
    "list_models",
]
