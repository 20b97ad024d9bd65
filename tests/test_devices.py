"""What holds on a CPU holds on a GPU: gradients, inverses, random numbers, memory, runs.

Most tests run on both. Those that need a GPU are skipped without one.
"""

import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn
from torchvision.models import resnet18

import revzoo
from revzoo.core.modes import MODES

ROOT = Path(__file__).parents[1]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MODELS = {
    "revnet38": {"units": (2, 1, 1)},
    "irevnet13": {"num_classes": 10},
    "revvit_cifar": {"depth": 2, "img_size": 16, "width": 32},
    "revmvit_base": {"width": 8, "units": (1, 2), "img_size": 16},
    "revbifpn_s0": {"channels": (48, 16), "head_channels": (16, 24), "features": 32},
}


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture(autouse=True)
def convolutions_in_float32(monkeypatch):
    """On a GPU they use TF32 by default, whose errors would hide others."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


def autocast(device, dtype):
    if dtype == "float32":
        return nullcontext()
    return torch.autocast(device, dtype=TYPES[dtype])


def gradients(model, images, dtype="float32"):
    """The gradients of one step, in float64 on the host."""
    device = images.device.type
    model.zero_grad()
    torch.manual_seed(1)
    with autocast(device, dtype):
        logits = model(images)
    logits.float().logsumexp(1).mean().backward()
    return [p.grad.double().cpu() for p in model.parameters() if p.grad is not None]


def error(found, expected):
    """The largest relative error of a gradient that is not tiny."""
    size = max(float(e.norm()) for e in expected)
    pairs = zip(found, expected, strict=True)
    return max(float((f - e).norm()) / max(float(e.norm()), 1e-3 * size) for f, e in pairs)


def model_of(name, device, **options):
    torch.manual_seed(0)
    model = revzoo.create_model(name, **{**MODELS[name], **options}).to(device)
    generator = torch.Generator().manual_seed(0)
    side = 16 if name != "irevnet13" else 8
    images = torch.randn(8, model.in_chans, side, side, generator=generator).to(device)
    return model, images


@pytest.mark.parametrize("mode", [m for m in MODES if m != "store"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_in_float32(name, mode, device):
    model, images = model_of(name, device)
    revzoo.set_memory(model, "store")
    expected = gradients(model, images)
    revzoo.set_memory(model, mode)
    # exact rounds its streams to multiples of 2**-23
    assert error(gradients(model, images), expected) < (2e-3 if mode == "exact" else 3e-4)


@pytest.mark.parametrize("mode", ["recompute", "exact"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_under_autocast(name, dtype, mode, device):
    if device == "cpu" and dtype == "fp16":
        pytest.skip("float16 autocast is for GPUs")
    model, images = model_of(name, device)
    model.eval()  # BatchNorm of a small batch would amplify the rounding of exact's grid
    revzoo.set_memory(model, "store")
    expected = gradients(model, images, dtype)
    revzoo.set_memory(model, mode)
    bound = 1e-6 if mode == "recompute" else 0.1
    assert error(gradients(model, images, dtype), expected) <= bound


@pytest.mark.parametrize("dtype", ["float32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_two_steps_of_exact_have_the_same_bits(name, dtype, device):
    model, images = model_of(name, device)
    revzoo.set_memory(model, "exact")
    first = gradients(model, images, dtype)
    again = gradients(model, images, dtype)
    assert all(map(torch.equal, first, again))


@pytest.mark.parametrize("mode", ["recompute", "invert", "exact"])
def test_dropout_is_repeated(mode, device):
    model, images = model_of("revnet38", device, dropout=0.3)
    revzoo.set_memory(model, "store")
    expected = gradients(model, images)
    revzoo.set_memory(model, mode)
    assert error(gradients(model, images), expected) < (2e-3 if mode == "exact" else 3e-4)


@pytest.mark.parametrize("dtype", ["float32", "bf16"])
def test_exact_reconstructs_every_bit(dtype, device):
    torch.manual_seed(0)

    def branch():
        return nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 8, 1))

    blocks = [revzoo.ReversibleBlock(branch(), branch()) for _ in range(6)]
    seq = revzoo.ReversibleSequence(blocks, memory="exact").to(device)
    x = torch.randn(4, 16, 12, 12, device=device)
    with torch.no_grad(), autocast(device, dtype):
        back = seq.inverse(seq(x))
    assert torch.equal(back, (x.double() * 2**23).round().div(2**23).float())


def test_a_converted_resnet(device):
    torch.manual_seed(0)
    model = resnet18(num_classes=10).to(device)
    images = torch.randn(4, 3, 64, 64, generator=torch.Generator().manual_seed(0)).to(device)
    expected = gradients(model, images)
    revzoo.make_reversible(model, bits=None)
    assert error(gradients(model, images), expected) < 5e-3


def test_a_converted_transformer(device):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).to(device)
    x = torch.randn(4, 10, 32, generator=torch.Generator().manual_seed(0)).to(device)
    expected = gradients(model, x)
    revzoo.make_reversible(model, bits=None)
    assert error(gradients(model, x), expected) < 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["recompute", "invert", "exact", "offload"])
def test_a_step_takes_less_memory(mode):
    torch.manual_seed(0)
    peaks = {}
    for memory in ("store", mode):
        model = revzoo.create_model("revnet110", memory=memory).cuda()
        images = torch.randn(128, 3, 32, 32, device="cuda")
        model(images).logsumexp(1).mean().backward()
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        model(images).logsumexp(1).mean().backward()
        peaks[memory] = torch.cuda.max_memory_allocated() - start
        del model
    assert peaks[mode] < 0.4 * peaks["store"]


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_a_loss_scaler_finds_overflow_and_recovers(mode):
    torch.manual_seed(0)
    model = revzoo.create_model("revnet38", units=(1, 1, 1), memory=mode).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**40)
    images = torch.randn(8, 3, 16, 16, device="cuda")
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(40):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(images).float().logsumexp(1).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() < 2.0**30
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    assert not all(map(torch.equal, before, model.parameters()))


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_a_step_on_another_stream(mode):
    model, images = model_of("revnet38", "cuda")
    revzoo.set_memory(model, "store")
    expected = gradients(model, images)
    revzoo.set_memory(model, mode)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = gradients(model, images)
    stream.synchronize()
    assert error(found, expected) < (2e-3 if mode == "exact" else 3e-4)


@pytest.mark.gpu
def test_a_compiled_network():
    from revzoo.training import CompiledBranches

    model, images = model_of("revnet38", "cuda")
    revzoo.set_memory(model, "exact")
    expected = gradients(model, images)
    CompiledBranches().setup(None, nn.ModuleList([model]), "fit")
    assert error(gradients(model, images), expected) < 1e-2


def command(*arguments, folder):
    done = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "tf32"])
@pytest.mark.parametrize("memory", ["store", "exact", "auto"])
def test_a_run(precision, memory, tmp_path):
    command(
        "trainer=gpu",
        "trainer.max_epochs=2",
        f"precision={precision}",
        f"memory={memory}",
        "+model.units=[1,1,1]",
        f"hydra.run.dir={tmp_path}/run",
        folder=tmp_path,
    )
    assert (tmp_path / "run" / "checkpoints" / "best.ckpt").exists()
