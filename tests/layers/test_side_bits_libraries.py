"""Networks of torchvision, timm and Hugging Face, small ones, made reversible and plain again."""

import contextlib
import copy
import importlib

import pytest
import torch
from torch import nn

from revzoo import make_reversible, reversible_blocks, set_memory

BF16 = torch.autocast("cpu", dtype=torch.bfloat16)


def images(size, batch=2):
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(1))


def image_call(size, batch=2):
    return lambda net: net(images(size, batch))


def from_torchvision(name):
    models = importlib.import_module("torchvision.models")
    swin = models.swin_transformer
    stages = {"patch_size": [4, 4], "embed_dim": 24, "depths": [2, 2], "num_heads": [2, 4]}
    stages |= {"window_size": [4, 4], "stochastic_depth_prob": 0.2, "num_classes": 5}
    second = {"block": swin.SwinTransformerBlockV2, "downsample_layer": swin.PatchMergingV2}
    cnblock, bottleneck = models.convnext.CNBlockConfig, models.resnet.Bottleneck
    small = {"width_per_group": 16, "num_classes": 5}
    return {
        "resnet": lambda: models.resnet18(num_classes=5),
        "wide_resnet": lambda: models.ResNet(bottleneck, [3, 1, 1, 1], **small),
        "regnet": lambda: models.regnet_y_400mf(num_classes=5),
        "convnext": lambda: models.ConvNeXt(
            [cnblock(16, 32, 3), cnblock(32, None, 3)], 0.2, num_classes=5
        ),
        "vit": lambda: models.VisionTransformer(32, 8, 4, 2, 32, 64, 0.1, 0.1, num_classes=5),
        "swin": lambda: models.SwinTransformer(**stages),
        "swin_v2": lambda: models.SwinTransformer(**stages, **second),
    }[name], image_call(32, 4)


def from_timm(name):
    timm = importlib.import_module("timm")
    vit = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 4, "num_heads": 2}
    drops = {"drop_path_rate": 0.2}
    swin = {
        "img_size": 32,
        "window_size": 4,
        "embed_dim": 24,
        "depths": (2, 2),
        "num_heads": (2, 4),
    }
    options = {
        "resnet18": {"zero_init_last": False},
        "wide_resnet50_2": {"base_width": 8, "layers": (3, 1, 1, 1), "zero_init_last": False},
        "regnety_002": {},
        "convnext_atto": {"depths": (3, 1, 1, 1), "dims": (16, 16, 24, 32), **drops},
        "vit_tiny_patch16_224": vit | drops | {"proj_drop_rate": 0.1, "attn_drop_rate": 0.1},
        "deit_tiny_distilled_patch16_224": vit | drops,
        "deit3_small_patch16_224": vit | drops | {"init_values": 0.1},
        "swin_tiny_patch4_window7_224": swin | drops,
        "eva02_tiny_patch14_224": vit | drops,
    }
    return lambda: timm.create_model(name, num_classes=5, **options[name]), image_call(32, 4)


def from_transformers(name):
    library = importlib.import_module("transformers")
    name, _, how = name.partition(" ")
    ids = torch.randint(0, 99, (2, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, 8:] = 0
    sizes = {"num_hidden_layers": 4, "num_attention_heads": 4, "hidden_size": 32}
    sizes |= {"intermediate_size": 64, "attn_implementation": "eager" if "eager" in how else "sdpa"}
    gpt2 = {"n_layer": 4, "n_head": 4, "n_embd": 32, "bos_token_id": 0, "eos_token_id": 0}
    words = {"vocab_size": 99}
    config = {
        "LlamaForCausalLM": ("LlamaConfig", sizes | words | {"attention_dropout": 0.1}),
        "GPT2LMHeadModel": ("GPT2Config", gpt2 | words),
        "BertModel": ("BertConfig", sizes | words),
        "ViTModel": ("ViTConfig", sizes | {"image_size": 32, "patch_size": 8}),
    }[name]

    def make():
        return getattr(library, name)(getattr(library, config[0])(**config[1]))

    def call(net):
        if name == "ViTModel":
            return net(pixel_values=images(32))[0]
        text = {"input_ids": ids, "attention_mask": mask}
        if name == "LlamaForCausalLM":
            text["position_ids"] = torch.arange(12).expand(2, 12) + 3
        if "cache" in how:
            text["use_cache"] = True
        if "attentions" in how:
            text["output_attentions"] = True
        return net(**text)[0]

    return make, call


NETWORKS = {
    "torchvision": (
        from_torchvision,
        ["resnet", "wide_resnet", "regnet", "convnext", "vit", "swin", "swin_v2"],
    ),
    "timm": (
        from_timm,
        [
            "resnet18",
            "wide_resnet50_2",
            "regnety_002",
            "convnext_atto",
            "vit_tiny_patch16_224",
            "deit_tiny_distilled_patch16_224",
            "deit3_small_patch16_224",
            "swin_tiny_patch4_window7_224",
            "eva02_tiny_patch14_224",
        ],
    ),
    "transformers": (
        from_transformers,
        [
            "LlamaForCausalLM",
            "LlamaForCausalLM eager cache",
            "GPT2LMHeadModel",
            "GPT2LMHeadModel cache",
            "BertModel",
            "BertModel eager attentions",
            "ViTModel",
        ],
    ),
}


# one of each kind of layer; slow without the processor's own bfloat16
IN_BF16 = ("resnet", "convnext", "swin", "deit3_small_patch16_224", "LlamaForCausalLM", "BertModel")
CASES = [
    pytest.param(library, name, context, id=f"{library}-{name}-{kind}")
    for library, (_, names) in NETWORKS.items()
    for name in names
    for kind, context in {"fp32": contextlib.nullcontext, "bf16": lambda: BF16}.items()
    if kind == "fp32" or name in IN_BF16
]


def effects(net, call, context, weights):
    """Outputs, gradients and buffers of one training step from the same state."""
    net.load_state_dict(weights)
    net.zero_grad(set_to_none=True)
    torch.manual_seed(2)  # of dropout and drop path
    with context():
        y = call(net)
    y.float().square().mean().backward()
    gradients = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    return [y.detach(), *gradients, *(b.clone() for b in net.buffers())]


@pytest.mark.parametrize(("library", "name", "context"), CASES)
def test_a_networks_gradients_and_its_way_back(library, name, context):
    pytest.importorskip(library)
    make, call = NETWORKS[library][0](name)
    torch.manual_seed(0)
    net = make()
    with torch.no_grad():
        for key, p in net.named_parameters():  # heads and tokens start at zero, or near it
            if p.abs().max() < 1e-3 and (p.dim() > 1 or "token" in key):
                p.normal_(std=0.02)
    keys, weights = list(net.state_dict()), copy.deepcopy(net.state_dict())
    plain = effects(net, call, context, weights)
    make_reversible(net, 8)
    assert list(net.state_dict()) == keys
    reversible = effects(net, call, context, weights)
    roles = [row.role for row in reversible_blocks(net)]
    assert "joins" in roles
    assert "" not in roles
    set_memory(net, "store", grid="auto")
    assert all(map(torch.equal, reversible, effects(net, call, context, weights)))
    net.eval().load_state_dict(weights)
    with torch.no_grad():
        changed = call(net)
        make_reversible(net, None)
        expected = call(net)
    assert (changed - expected).norm() < 0.01 * expected.norm()
    assert all(map(torch.equal, plain, effects(net.train(), call, context, weights)))


def test_a_cache_of_keys_is_filled_once():
    transformers = pytest.importorskip("transformers")
    sizes = {"num_hidden_layers": 3, "num_attention_heads": 2, "hidden_size": 16}
    config = transformers.LlamaConfig(vocab_size=9, intermediate_size=16, **sizes)
    torch.manual_seed(0)
    net = make_reversible(transformers.LlamaForCausalLM(config))
    ids = torch.randint(0, 9, (1, 6))
    out = net(input_ids=ids, labels=ids, use_cache=True)
    before = out.past_key_values.layers[1].keys.clone()
    out.loss.backward()
    assert torch.equal(out.past_key_values.layers[1].keys, before)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    words = [net.eval().generate(ids, use_cache=cached, **options) for cached in (True, False)]
    assert torch.equal(*words)


@pytest.mark.parametrize("how", ["graph", "getter"])
def test_feature_maps_of_torchvision(how):
    resnet = importlib.import_module("torchvision.models.resnet")
    extraction = importlib.import_module("torchvision.models.feature_extraction")
    getter = importlib.import_module("torchvision.models._utils").IntermediateLayerGetter

    def maps_of(net):
        if how == "getter":
            return getter(net, {name: name for name in ("layer1", "layer2")})
        return extraction.create_feature_extractor(net, ["layer1", "layer2"])

    def small():
        torch.manual_seed(0)
        return resnet.ResNet(resnet.BasicBlock, [3, 2, 1, 1])

    found = []
    for mode in ("exact", "store"):
        net = maps_of(make_reversible(small(), 3))
        set_memory(net, mode, grid="auto")
        maps = list(net(images(32)).values())
        loss = sum(m.square().mean() for m in maps)
        trained = [p for n, p in net.named_parameters() if n.startswith(("conv1", "layer1"))]
        found.append([*maps, *torch.autograd.grad(loss, trained)])
        assert [row.role for row in reversible_blocks(net)][:5] == [
            *("starts", "joins", "joins"),
            *("alone", "starts"),
        ]
    assert all(map(torch.equal, *(maps[:2] for maps in found)))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)  # a map has several uses
    plain = list(maps_of(small())(images(32)).values())
    assert not torch.allclose(found[0][0], plain[0], atol=1e-3)
    if how == "graph":
        with pytest.raises(ValueError, match=r"does not call block 'layer1.0', only its layers"):
            make_reversible(maps_of(small()))


def detector():
    detection = importlib.import_module("torchvision.models.detection")
    backbone = detection.backbone_utils.resnet_fpn_backbone(
        backbone_name="resnet18", weights=None, trainable_layers=4
    )  # with frozen BatchNorm and a frozen stem
    return detection.RetinaNet(backbone, 3, min_size=64, max_size=64)


def segmenter():
    models = importlib.import_module("torchvision.models")
    getter = importlib.import_module("torchvision.models._utils").IntermediateLayerGetter
    body = models.resnet.ResNet(models.resnet.BasicBlock, [3, 2, 1, 1])
    maps = getter(body, {"layer2": "aux", "layer4": "out"})
    heads = [models.segmentation.fcn.FCNHead(width, 3) for width in (512, 128)]
    return models.segmentation.FCN(maps, *heads)


@pytest.mark.parametrize("make", [detector, segmenter])
def test_detection_and_segmentation(make):
    box = {"boxes": torch.tensor([[5.0, 5.0, 40.0, 40.0]]), "labels": torch.tensor([1])}
    found = []
    for mode in ("exact", "store"):
        torch.manual_seed(0)
        net = make_reversible(make(), 4).train()
        set_memory(net, mode, grid="auto")
        torch.manual_seed(2)
        x = images(64)
        outputs = net(list(x), [box, box]) if make is detector else net(x)
        loss = sum(v.square().mean() for v in outputs.values())
        trained = [p for p in net.parameters() if p.requires_grad]
        found.append([loss, *torch.autograd.grad(loss, trained), *net.buffers()])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)  # a feature map has several uses
    assert "joins" in {row.role for row in reversible_blocks(net)}


class LowRank(nn.Module):
    """An adapter beside a frozen linear layer, as in LoRA (arXiv 2106.09685)."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return self.base(x) + self.up(self.down(self.drop(x)))


@pytest.mark.parametrize("order", ["adapters first", "reversible first"])
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_adapters_and_the_librarys_checkpoint(order, reentrant):
    transformers = pytest.importorskip("transformers")
    sizes = {"num_hidden_layers": 3, "num_attention_heads": 2, "hidden_size": 16}
    config = transformers.LlamaConfig(vocab_size=9, intermediate_size=16, **sizes)
    ids = torch.randint(0, 9, (2, 6), generator=torch.Generator().manual_seed(0))

    def gradients(mode, reentrant):
        torch.manual_seed(0)
        net = transformers.LlamaForCausalLM(config).train()
        if order == "reversible first":
            make_reversible(net)
        net.requires_grad_(False)
        for layer in net.model.layers:
            layer.self_attn.q_proj = LowRank(layer.self_attn.q_proj)
        if reentrant is not None:
            net.activation_checkpointing_enable({"use_reentrant": reentrant})
            net.enable_input_require_grads()
        make_reversible(net)
        set_memory(net, mode, grid="auto")
        torch.manual_seed(1)
        loss = net(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        assert [row.role for row in reversible_blocks(net)] == ["starts", "joins", "joins"]
        return [loss, *(p.grad for p in net.parameters() if p.requires_grad)]

    if reentrant:
        with pytest.raises(RuntimeError, match="set use_reentrant=False"):
            gradients("exact", reentrant)
        return
    found = gradients("exact", reentrant), gradients("store", None)
    assert len(found[0]) == 7
    assert all(map(torch.equal, *found))


def test_torchs_own_encoder():
    net = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 3, enable_nested_tensor=False
    )
    make_reversible(net)
    assert [row.path for row in reversible_blocks(net)] == ["layers.0", "layers.1", "layers.2"]
    net(torch.randn(2, 4, 16)).sum().backward()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_torchs_own_encoder_with_padded_batches():
    """In eval mode it passes nested tensors to its layers, which raised an error."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    net = make_reversible(nn.TransformerEncoder(layer, 3)).eval()
    padded = torch.zeros(2, 4, dtype=torch.bool)
    padded[0, 2:] = True
    x = torch.randn(2, 4, 16)
    expected = net(x, src_key_padding_mask=padded)
    with torch.no_grad():
        found = net(x, src_key_padding_mask=padded)
    assert [row.role for row in reversible_blocks(net)] == ["starts", "joins", "joins"]
    assert torch.allclose(found[~padded], expected[~padded], atol=1e-5)
