"""The zoo: networks built from the layers, and their registry."""

from revzoo.models.iresnet import IRESNETS, IResNet, IResNetVariant
from revzoo.models.irevnet import IREVNETS, IRevNet, IRevNetVariant
from revzoo.models.iunet import IUNETS, IUNet, IUNetVariant
from revzoo.models.momentumnet import MOMENTUMNETS, MomentumNet, MomentumNetVariant
from revzoo.models.network import FeatureInfo, FeatureNet, ImageNetwork
from revzoo.models.registry import create_model, from_pretrained, list_models
from revzoo.models.revbifpn import REVBIFPNS, RevBiFPN, RevBiFPNVariant
from revzoo.models.revcol import REVCOLS, RevCol, RevColVariant
from revzoo.models.revmvit import REVMVITS, RevMViT, RevMViTVariant
from revzoo.models.revnet import RESNETS, REVNETS, ResNet, RevNet, StagedNetwork, Variant
from revzoo.models.revunet import REVUNETS, RevUNet, RevUNetVariant
from revzoo.models.revvit import REVVITS, VITS, RevViT, RevViTVariant, ViT

__all__ = [
    "IRESNETS",
    "IREVNETS",
    "IUNETS",
    "MOMENTUMNETS",
    "RESNETS",
    "REVBIFPNS",
    "REVCOLS",
    "REVMVITS",
    "REVNETS",
    "REVUNETS",
    "REVVITS",
    "VITS",
    "FeatureInfo",
    "FeatureNet",
    "IResNet",
    "IResNetVariant",
    "IRevNet",
    "IRevNetVariant",
    "IUNet",
    "IUNetVariant",
    "ImageNetwork",
    "MomentumNet",
    "MomentumNetVariant",
    "ResNet",
    "RevBiFPN",
    "RevBiFPNVariant",
    "RevCol",
    "RevColVariant",
    "RevMViT",
    "RevMViTVariant",
    "RevNet",
    "RevUNet",
    "RevUNetVariant",
    "RevViT",
    "RevViTVariant",
    "StagedNetwork",
    "Variant",
    "ViT",
    "create_model",
    "from_pretrained",
    "list_models",
]
