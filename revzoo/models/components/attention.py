"""The residual functions of a transformer: attention among tokens, and an MLP on each.

    Attention   LN - queries, keys, values - softmax(q k^T / sqrt(d)) v - linear - [dropout]
    MLP         LN - linear - activation - [dropout] - linear - [dropout]

as in ViT (Dosovitskiy et al. 2021, arXiv 2010.11929), without the skip connection: the coupling
around them adds. Both end in stochastic depth (Huang et al. 2016, arXiv 1603.09382).
``torch.nn.MultiheadAttention`` computes the same attention, but takes three inputs and a mask,
which a branch of one stream does not have.

Shapes: B batch, N tokens, D width of a token.
"""

from torch import Tensor, nn
from torch.nn import functional

from revzoo.models.components.droppath import drop_path as make_drop_path
from revzoo.models.components.lean import run
from revzoo.models.components.norm import ACTIVATIONS

# ViT's layer normalisation (the JAX release of arXiv 2010.11929); torch's default is 1e-5.
EPSILON = 1e-6


class Attention(nn.Module):
    """Multi-head self-attention on ``(B, N, D)``, normalisation first.

    Args:
        width: D.
        heads: number of heads, a divisor of ``width``.
        dropout: probability of zeroing a value of the result.
        drop_path: probability of dropping the whole result of a sample.
    """

    def __init__(
        self, width: int, *, heads: int, dropout: float = 0.0, drop_path: float = 0.0
    ) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width, eps=EPSILON)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.drop = nn.Dropout(dropout)
        self.drop_path = make_drop_path(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each (B, heads, N, D / heads)
        mixed = functional.scaled_dot_product_attention(q, k, v)
        mixed = mixed.transpose(1, 2).reshape(batch, tokens, width)
        return self.drop_path(run((self.proj, self.drop), mixed))


class MLP(nn.Module):
    """Two linear layers on each token of ``(B, N, D)``, normalisation first.

    Args:
        width: D.
        hidden: width between the layers.
        activation: a name in :data:`~revzoo.models.components.norm.ACTIVATIONS`.
        dropout: probability of zeroing a value after either layer.
        drop_path: probability of dropping the whole result of a sample.
    """

    def __init__(
        self,
        width: int,
        *,
        hidden: int,
        activation: str = "gelu",
        dropout: float = 0.0,
        drop_path: float = 0.0,
    ) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=EPSILON)
        self.fc1 = nn.Linear(width, hidden)
        self.act = ACTIVATIONS[activation]()
        self.fc2 = nn.Linear(hidden, width)
        self.drop = nn.Dropout(dropout)
        self.drop_path = make_drop_path(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        layers = (self.norm, self.fc1, self.act, self.drop, self.fc2, self.drop)
        return self.drop_path(run(layers, x))
