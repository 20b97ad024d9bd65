"""Small networks of the zoo, and the loop over samples that per-sample gradients must equal."""

import torch
from torch import nn
from torch.nn import functional

import revzoo

MODES = ("store", "offload", "recompute", "invert", "exact")
_SMALL = {"norm": "group", "num_classes": 5, "stem_width": 8, "units": (2, 1)}
_STAGED = {**_SMALL, "widths": (8, 16), "strides": (1, 2)}
ZOO = {
    "resnet32": _STAGED,
    "revnet38": _STAGED,
    "revnet38_memcnn": _STAGED,
    "revnet164": _STAGED,
    "revnet56": _STAGED,
    "irevnet13": {
        "norm": "group",
        "num_classes": 5,
        "units": (2, 1),
        "strides": (1, 2),
        "channels": (6, 24),
    },
    "revvit_cifar": {"num_classes": 5, "width": 8, "depth": 2, "heads": 2, "img_size": 8},
}


def network(name, mode="store"):
    """The same small network in each call, in float64."""
    torch.manual_seed(0)
    if mode not in ("store", "offload", "recompute") and name.startswith("resnet"):
        mode = "recompute"  # nothing to invert
    net = revzoo.create_model(name, **ZOO[name]).double()
    revzoo.set_memory(net, mode)
    return net


class Gain(nn.Module):
    """Its parameter is one number, without dimensions."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return x * self.gain


def tied_network(mode):
    """Layers that are used twice and a weight that two layers share, on 8 features."""
    torch.manual_seed(0)
    shared = nn.Sequential(nn.Linear(4, 4), Gain(), nn.Tanh())
    blocks = [revzoo.ReversibleBlock(shared, nn.Sequential(nn.Linear(4, 4))) for _ in range(2)]
    blocks[1].steps[1].branch[0].weight = blocks[0].steps[1].branch[0].weight
    sequence = revzoo.ReversibleSequence(blocks, memory=mode)
    return nn.Sequential(sequence, nn.Linear(8, 5)).double()


class Attends(nn.Module):
    """Attention of a stream to itself."""

    def __init__(self, width, **options):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.options = options

    def forward(self, x):
        return self.attention(x, x, x, **self.options)[0]


def attention_network(mode):
    """Reversible blocks and a layer of torch with attention, on 6 tokens of 8 features."""
    torch.manual_seed(0)
    hidden = torch.arange(6) > torch.arange(6)[:, None]
    blocks = [
        revzoo.ReversibleBlock(Attends(4), nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))),
        revzoo.ReversibleBlock(Attends(4, need_weights=False, attn_mask=hidden)),
    ]
    sequence = revzoo.ReversibleSequence(blocks, memory=mode, dim=-1)
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
    return nn.Sequential(sequence, layer, nn.Flatten(), nn.Linear(48, 5)).double()


def attention_batch():
    """Input and labels of :func:`attention_network`."""
    images, labels = batch()
    return images.flatten(1)[:, :48].view(-1, 6, 8), labels


def tied_batch():
    """Input and labels of :func:`tied_network`."""
    images, labels = batch()
    return images.flatten(1)[:, :8], labels


def batch(count=3, size=8, seed=1):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(count, 3, size, size, dtype=torch.float64, generator=generator)
    return images, torch.arange(count) % 5


def looped(net, images, labels):
    """By parameter, the gradient of each sample's own loss ``(B, ...)``."""
    rows = []
    parameters = {n: p for n, p in net.named_parameters() if p.requires_grad}
    for i in range(len(images)):
        loss = functional.cross_entropy(net(images[i : i + 1]), labels[i : i + 1])
        rows.append(torch.autograd.grad(loss, parameters.values()))
    return {n: torch.stack(g) for n, g in zip(parameters, zip(*rows, strict=True), strict=True)}
