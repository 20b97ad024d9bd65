"""TensorFlow's checkpoints, and the release of RevNet in them.

The tests do without TensorFlow, so ``release`` states the release's forward pass again:
``resnet/models/resnet_model.py`` and ``revnet_model.py`` of renmengye/revnet-public.
``benchmarks/parity_tensorflow.py`` runs the release itself.
"""

from __future__ import annotations

import base64
import json
import shutil
import struct
import tarfile
import zlib
from itertools import takewhile
from pathlib import Path

import numpy as np
import pytest
import torch
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c
from torch.nn import functional

from revzoo import (
    ConversionError,
    WeightsTable,
    create_model,
    from_pretrained,
    load_published,
    set_memory,
)
from revzoo.cli.main import main
from revzoo.models.tensor_bundle import read_tensor_bundle
from revzoo.models.weights_file import read_tensorflow
from revzoo.weights.errors import ArchitectureMismatchError, UnreadableWeightsError
from revzoo.weights.table import SHIPPED

TYPES = {"float32": 1, "float64": 2, "int32": 3, "int64": 9, "float16": 19, "bool": 10}
HEADER = b"\x08\x01\x1a\x02\x08\x01"  # one data file, little-endian, version 1


def varint(n):
    low = bytes([n & 0x7F | (0x80 if n > 0x7F else 0)])
    return low + varint(n >> 7) if n > 0x7F else low


def field(number, value):
    if isinstance(value, int):
        return varint(number << 3) + varint(value) if value else b""  # zeros are omitted
    return varint(number << 3 | 2) + varint(len(value)) + value


def entry(array, offset, **other):
    shape = b"".join(field(2, field(1, size)) for size in array.shape)
    values = {1: TYPES[str(array.dtype)], 2: shape, 4: offset, 5: array.nbytes}
    values |= {int(number[1:]): value for number, value in other.items()}
    # the checksum of the values, field 6, has 4 bytes
    return b"".join(field(*item) for item in values.items()) + b"\x35" + bytes(4)


def block(rows, interval=16):
    data, before, restarts = b"", b"", []
    for i, (key, value) in enumerate(rows):
        shared = sum(
            1 for _ in takewhile(lambda ab: ab[0] == ab[1], zip(before, key, strict=False))
        )
        if i % interval == 0:
            shared, restarts = 0, [*restarts, len(data)]
        data += (
            varint(shared) + varint(len(key) - shared) + varint(len(value)) + key[shared:] + value
        )
        before = key
    return data + struct.pack(f"<{len(restarts) + 1}I", *restarts, len(restarts))


def table(rows, *, compression=0, per_block=20):
    data, places = b"", []
    blocks = [rows[i : i + per_block] for i in range(0, len(rows), per_block)]
    for content in [*blocks, [], None]:  # data, statistics, index
        # an index key is not less than the keys of its block
        keys = [(part[-1][0] + b"~", place) for part, place in zip(blocks, places, strict=False)]
        raw = block(keys if content is None else content)
        places.append(varint(len(data)) + varint(len(raw)))
        raw += bytes([compression])
        data += raw + struct.pack("<I", masked_crc32c(raw))
    footer = b"".join(places[-2:])
    return data + footer.ljust(40, b"\0") + struct.pack("<Q", 0xDB4775248B80FB57)


def write(path, variables, *, header=HEADER, others=None, **options):
    """The checkpoint ``path`` (NAME.index) of arrays by name; returns the path."""
    rows, data = [(b"", header)], b""
    for name, array in sorted(variables.items()):
        rows.append((name.encode(), entry(array, len(data), **(others or {}))))
        data += array.tobytes()
    path.write_bytes(table(rows, **options))
    path.with_suffix(".data-00000-of-00001").write_bytes(data)
    return path


@pytest.fixture
def index(tmp_path: Path) -> Path:
    return tmp_path / "model.ckpt-7.index"


def test_a_bundle_reads_as_it_was_written(index):
    rng = np.random.default_rng(0)
    arrays = {f"Model/unit_{i}/w": rng.normal(size=(2, i, 3)).astype("f4") for i in range(70)}
    arrays |= {"global_step": np.array(7, "i8"), "a": np.array([1, 2], "i4"), "b": np.ones(3, "f8")}
    arrays["half"] = np.array([[0.5, -2]], "f2")
    got = read_tensor_bundle(write(index, arrays))
    assert list(got) == sorted(arrays)
    for name, array in arrays.items():
        assert (got[name].dtype, got[name].shape) == (array.dtype, array.shape)
        assert np.array_equal(got[name], array)
    assert masked_crc32c(b"123456789") == 0xC78AB0E5  # CRC32C e3069283, masked


# index and data of tf.train.Saver().save(session, "model.ckpt-7"), TensorFlow 2.21; zlib, base64
OF_TENSORFLOW = (
    "eNpjYGDjYJRi4mBkEOT2zU9JzdFPz8lPSsyJLy5JLeDgFGLQ4DDdfX2+IJugYGZeZok+iIhPytNPSi1J5BAWYhFi"
    "4mBS4NBgMZ2sb+wrwCabnJ9Xpl/OwSgkAJRhBMkCMTNYFY+Ggen1ZaF32NhFc/LTgWaVAyU54NI2QOmebVfa2RgF"
    "84BCEJNzgNZne91zYQACRhAxr9Q5Ac458GnhBgZGZj+G9YxwsamqnJe3MHIcZORnIAjCfzd0q5S63wYAb2EwiA==",
    "eNpjZ4ACC4YDEEaDPZBwACIgbgDiBUB8AIgfADGDIwODABArALGBI0zrJBVPIDpkD6Ev2d/elgtCUP4j++1g7jN7"
    "RqDaf////wcAh40fBA==",
)


def test_a_checkpoint_of_tensorflow_is_read(index):
    for suffix, text in zip((".index", ".data-00000-of-00001"), OF_TENSORFLOW, strict=True):
        index.with_suffix(suffix).write_bytes(zlib.decompress(base64.b64decode(text)))
    expected = {
        "Model/global_step": np.array(7, "i8"),
        "Model/init/init_bn/beta": np.array([0.5, -2], "f2"),
        "Model/init/init_conv/w": np.arange(12, dtype="f4").reshape(1, 2, 3, 2),
        "Model/logit/w": np.arange(6, dtype="f8").reshape(3, 2) / 7,
        "Model/n": np.array([1, -2], "i4"),
    }
    got = read_tensor_bundle(index)
    assert list(got) == list(expected)
    for name, array in expected.items():
        assert (got[name].dtype, got[name].shape) == (array.dtype, array.shape)
        assert np.array_equal(got[name], array)


def damaged(index, at):
    data = bytearray(index.read_bytes())
    data[at] ^= 4
    index.write_bytes(data)


ONES = {"a/w": np.ones((2, 3), "f4")}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compression": 1}, "is compressed .type 1.*expected no compression"),
        ({"header": b"\x08\x02"}, "describes 2 data files, little-endian: expected 1"),
        ({"header": b"\x08\x01\x10\x01"}, "big-endian: expected 1, little-endian"),
        ({"others": {"_7": b"\x0a\x00"}}, "a/w is stored in slices: expected whole"),
        ({"others": {"_1": 7}}, "a/w has type 7 .* expected one of float32"),
        ({"others": {"_5": 2**62}}, r"shape \(2, 3\) and type float32 has 4611686018427387904"),
        ({"others": {"_2": field(2, field(1, 2**40))}}, "shape .1099511627776,. .* has 24 bytes"),
        ({"others": {"_4": 2**40}}, "has 24 bytes, expected at least 1,099,511,627,800"),
        ({"others": {"_2": 3}}, "damaged, cut off or not the index"),
        ({"others": {"_4": b"3"}}, "damaged, cut off or not the index"),
        ({"others": {"_2": b"\x12\x7f"}}, "a field of 127 bytes ends after its message"),
    ],
)
def test_what_the_reader_does_not_read_is_refused(options, message, index):
    with pytest.raises(UnreadableWeightsError, match=message):
        read_tensor_bundle(write(index, ONES, **options))


def test_damaged_files_are_refused(index):
    write(index, ONES)
    whole = index.read_bytes()
    for at in range(len(whole)):
        index.write_bytes(whole[:at])
        with pytest.raises(
            UnreadableWeightsError, match=r"damaged, cut off or not the index.*fetch"
        ):
            read_tensor_bundle(index)
    for at, message in (
        (2, "checksum .* of the block at 0, expected"),
        (-1, "it ends with .* exp"),
    ):
        index.write_bytes(whole)
        damaged(index, at)
        with pytest.raises(UnreadableWeightsError, match=message):
            read_tensor_bundle(index)
    index.write_bytes(whole)
    data = index.with_suffix(".data-00000-of-00001")
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(ConversionError, match=r"has 23 bytes, expected at least 24.*Fetch both"):
        load_published(index, "revnet")
    with pytest.raises(UnreadableWeightsError, match=r"not the index.*expected NAME.index"):
        read_tensor_bundle(data)


def test_a_table_that_is_no_bundle_is_refused(index):
    index.write_bytes(table([(b"a/w", entry(ONES["a/w"], 0))]))
    with pytest.raises(UnreadableWeightsError, match="b'a/w' follows None, expected a header"):
        read_tensor_bundle(index)


def test_few_bytes_cannot_fill_the_memory(index):
    """Names repeat the ones before them; variables may share a place; blocks may repeat."""
    one = entry(ONES["a/w"], 0)
    index.with_suffix(".data-00000-of-00001").write_bytes(bytes(24))
    for keys, message in (
        ([b"a", b"b"], "has 24 bytes, expected at least 48"),
        ([b"a" * 1001], "an entry of 0 . 1002 and"),
        ([b"b", b"a"], "b'a' follows b'b', expected a header, then sorted"),
    ):
        index.write_bytes(table([(b"", HEADER), *((key, one) for key in keys)]))
        with pytest.raises(UnreadableWeightsError, match=message):
            read_tensor_bundle(index)


# The release: units, filters of both streams, bottleneck, ImageNet stem, RevNet
SMALL = {
    "revnet104": ((1, 2, 1), (8, 8, 16, 24), True, True, True),
    "revnet38": ((2, 1, 2), (8, 8, 12, 16), False, False, True),
    "revnet164": ((1, 2, 1), (8, 8, 16, 24), True, False, True),
    "resnet50": ((1, 2, 1), (8, 8, 16, 24), True, True, False),
    "resnet32": ((2, 1, 2), (8, 8, 12, 16), False, False, False),
}


def same(x, kernel, stride, value=0.0):
    """By the formula in TensorFlow's documentation of tf.nn."""
    pads = []
    for side in (x.shape[3], x.shape[2]):
        left = side % stride
        total = max(kernel - (left or stride), 0)
        pads += [total // 2, total - total // 2]
    return functional.pad(x, pads, value=value)


def release(x, variables, units, filters, bottleneck, imagenet, reversible):
    """Logits; draws the variables that do not exist, as ``tf.get_variable`` creates them."""
    generator = torch.Generator().manual_seed(len(variables))

    def get(name, *shape, low=-1.0, high=1.0):
        if f"Model/{name}" not in variables:
            drawn = torch.rand(shape, generator=generator) * (high - low) + low
            variables[f"Model/{name}"] = drawn.numpy()
        return torch.from_numpy(variables[f"Model/{name}"]).double()

    def conv(name, x, size, width, stride=1):
        fan = (3 / (size * size * x.shape[1])) ** 0.5
        kernel = get(f"{name}/w", size, size, x.shape[1], width, low=-fan, high=fan)
        return functional.conv2d(same(x, size, stride), kernel.permute(3, 2, 0, 1), stride=stride)

    def bn_relu(name, x):
        c = x.shape[1]
        beta, gamma = get(f"{name}/beta", c), get(f"{name}/gamma", c, low=0.5)
        mean, var = get(f"{name}/ema_mean", c), get(f"{name}/ema_var", c, low=0.5, high=2.0)
        beta, gamma, mean, var = (t[:, None, None] for t in (beta, gamma, mean, var))
        return torch.relu((x - mean) / torch.sqrt(var + 1e-3) * gamma + beta)

    def inner(scope, x, width, stride, no_activation=False):
        sizes = (1, 3, 1) if bottleneck else (3, 3)
        for i, size in enumerate(sizes, 1):
            if i > 1 or not no_activation:
                x = bn_relu(f"{scope}sub{i}/bn{i}", x)
            out = width // 4 if bottleneck and i < 3 else width
            x = conv(f"{scope}sub{i}/conv{i}", x, size, out, stride if i == 1 else 1)
        return x

    def shortcut(scope, x, width, stride):
        if bottleneck:
            keeps = stride == 1 and x.shape[1] == width
            return x if keeps else conv(f"{scope}project", x, 1, width, stride)
        x = functional.avg_pool2d(x, stride, stride)
        pad = (width - x.shape[1]) // 2
        return functional.pad(x, (0, 0, 0, 0, pad, pad))

    size, stride = (7, 2) if imagenet else (3, 1)
    h = bn_relu("init/init_bn", conv("init/init_conv", x.double(), size, filters[0], stride))
    if imagenet:
        h = functional.max_pool2d(same(h, 3, 2, -torch.inf), 3, 2)
    for s, count in enumerate(units):
        width = filters[s + 1] * (4 if bottleneck else 1)
        for u in range(count):
            scope, stride = f"unit_{s + 1}_{u}/", 2 if s and not u else 1
            first = not s and not u
            if not reversible:
                h = inner(scope, h, width, stride, first) + shortcut(scope, h, width, stride)
                continue
            (x1, x2), half = h.chunk(2, dim=1), width // 2
            f = inner(f"{scope}f/", x2, half, stride, first)
            y1 = f + shortcut(f"{scope}x1_bottleneck/", x1, half, stride)
            g = inner(f"{scope}g/", y1, half, 1)
            h = torch.cat((y1, g + shortcut(f"{scope}x2_bottleneck/", x2, half, stride)), dim=1)
    h = bn_relu("unit_last/final_bn", h).mean((2, 3))
    return h @ get("logit/w", h.shape[1], 7) + get("logit/b", 7)


@pytest.mark.parametrize("side", [32, 36])
@pytest.mark.parametrize("name", SMALL)
def test_the_releases_networks_compute_the_same(name, side, index):
    torch.manual_seed(0)
    x, variables = torch.randn(2, 3, side, side), {}
    expected = release(x, variables, *SMALL[name])
    training = {"Model/global_step": np.zeros((), "f4"), "Model/learn_rate": np.zeros((), "f4")}
    training["Model/Model/logit/w/Momentum"] = variables["Model/logit/w"]
    ours = load_published(write(index, variables | training), "revnet")
    units, filters, bottleneck, imagenet, _ = SMALL[name]
    row = ours.variant
    assert (row.units, row.stem_width, *row.widths) == (units, *filters)
    assert (row.branch == "bottleneck", row.downsampling_stem) == (bottleneck, imagenet)
    assert (row.convention, ours.num_classes, not ours.training) == ("gomez_same", 7, True)
    set_memory(ours, "store")
    with torch.no_grad():
        actual = ours.double()(x.double())
        changes = {"convention": "gomez", "memory": "store", "num_classes": 7}
        shifted = create_model(ours.spec.architecture, **{**ours.spec.options, **changes}).eval()
        shifted.load_state_dict(ours.state_dict())
        other = shifted.double()(x.double())
    scale = expected.abs().max()
    assert (actual - expected).abs().max() <= 1e-9 * scale
    # torch's padding samples other pixels, except where all strides are those of 1x1 convolutions
    assert ((other - expected).abs().max() > 1e-3 * scale) == (imagenet or not bottleneck)


def test_published_networks_are_recognised(index):
    variables = {}
    layout = ((3, 3, 3), (32, 32, 64, 112), False, False, True)
    release(torch.zeros(1, 3, 8, 8), variables, *layout)
    write(index, variables)
    options = {"convention": "gomez_same"}
    assert load_published(index, "revnet").spec[:2] == ("revnet38", options)
    named = load_published(index, "revnet", name="revnet38", memory="recompute")
    assert named.spec[:2] == ("revnet38", options)
    with pytest.raises(ConversionError, match=r"(?s)do not fit.*stages\.0\.steps\.3"):
        load_published(index, "revnet", name="revnet110")
    with pytest.raises(ArchitectureMismatchError, match=r"than convention='gomez'.*gomez_same"):
        create_model("revnet38", checkpoint_path=index)
    by_path = create_model("revnet38", checkpoint_path=index, **options)
    assert all(map(torch.equal, by_path.parameters(), load_published(index, "revnet").parameters()))


def test_variables_of_another_network_are_refused(index):
    with pytest.raises(ConversionError, match=r"not a checkpoint of 'revnet'.*dense.weight"):
        load_published(write(index, {"dense/w": np.ones((2, 2), "f4")}), "revnet")
    variables = {}
    release(torch.zeros(1, 3, 8, 8), variables, *SMALL["revnet38"])
    write(index, variables | {"Model/extra": np.ones(2, "f4")})
    with pytest.raises(ConversionError, match=r"unexpected: .extra"):
        load_published(index, "revnet")


def archive(index, *names):
    """The publisher's ``.tar.gz`` of a checkpoint in a folder."""
    path = index.with_name("revnet.tar.gz")
    with tarfile.open(path, "w:gz") as file:
        for name in names or (index.name, index.with_suffix(".data-00000-of-00001").name):
            file.add(index.with_name(name), f"revnet/{name}")
    return path


def test_an_archive_gives_the_network_by_path_and_by_name(index, tmp_path, monkeypatch):
    """As ``revnet104.in1k``, for a smaller network."""
    torch.manual_seed(0)
    x, variables = torch.randn(2, 3, 32, 32), {}
    expected = release(x, variables, *SMALL["revnet104"])
    packed = archive(write(index, variables))
    units, (stem, *widths), *_ = SMALL["revnet104"]
    options = {"convention": "gomez_same", "units": units, "stem_width": stem, "widths": widths}
    entry = {"name": "revnet104.in1k", "architecture": "revnet104", "num_classes": 7}
    entry |= {"input_size": [3, 32, 32], "url": "http://host/revnet.tar.gz"}
    (tmp_path / "table").mkdir()
    text = json.dumps(entry | {"options": options | {"strides": [1, 2, 2]}})
    (tmp_path / "table" / "revnet104.in1k.json").write_text(text)

    def download(url, target, *, sha256):
        assert (url, sha256) == (entry["url"], None)
        shutil.copy(packed, target)

    monkeypatch.setattr("revzoo.models.pretrained.download", download)
    keywords = {"table": WeightsTable(tmp_path / "table"), "cache_dir": tmp_path / "cache"}
    for sources in ({"pretrained": True}, {"checkpoint_path": packed}):
        model = create_model("revnet104.in1k", memory="store", **keywords, **sources).eval()
        with torch.no_grad():
            assert (model(x) - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert load_published(packed, "revnet").num_classes == 7


def test_the_entry_of_revnet_104_has_the_options_and_size_of_its_checkpoint():
    entry = SHIPPED.entries["revnet104.in1k"]
    variables = {}
    layout = ((2, 2, 11, 2), (128, 128, 256, 512, 832), True, True, True)
    release(torch.zeros(1, 3, 32, 32), variables, *layout)
    with torch.device("meta"):
        model = create_model(entry.architecture, num_classes=7, **entry.options)
    names = dict(model.published_keys())
    layers = {name.removeprefix("Model/").rpartition("/")[0] for name in variables}
    assert {names[layer] for layer in layers} == {
        key.rpartition(".")[0] for key in model.state_dict()
    }
    values = sum(v.size for k, v in variables.items() if "/ema_" not in k) + 993 * (3328 + 1)
    assert entry.parameters == pytest.approx(values / 1e6, rel=5e-3)


def test_an_archive_without_one_checkpoint_is_refused(index):
    write(index, ONES)
    data = index.with_suffix(".data-00000-of-00001").name
    for name in (data, index.name):
        with pytest.raises(UnreadableWeightsError, match=r"holds 0 TensorFlow check.*Unpack"):
            read_tensorflow(archive(index, name))
    other = write(index.with_name("b.index"), ONES).with_suffix(".data-00000-of-00001").name
    with pytest.raises(UnreadableWeightsError, match=r"holds 2 .*b\.index, model\.ckpt-7\.index"):
        read_tensorflow(archive(index, "b.index", other, index.name, data))
    path = archive(index)
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(UnreadableWeightsError, match=r"cut off or not a \.tar\.gz archive"):
        read_tensorflow(path)


def test_the_command_converts_a_checkpoint(index, tmp_path, capsys):
    torch.manual_seed(0)
    x, variables = torch.randn(1, 3, 32, 32), {}
    expected = release(x, variables, *SMALL["revnet104"])
    main(["convert", "revnet", str(write(index, variables)), str(tmp_path / "r")])
    assert ", 7 classes" in capsys.readouterr().out
    with torch.no_grad():
        actual = from_pretrained(tmp_path / "r").eval()(x)
    assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max()
