"""Wrong command lines get an answer before the slow libraries are imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from revzoo.cli.config import compose
from revzoo.cli.main import main

# a command line, and a part of its message
WITHOUT_TORCH = {
    "train model.name=revnt38": "did you mean 'revnet38'",
    "train memory.mode=invrt": "did you mean 'invert'",
    "train -m optim.lrr=1 seed=1,2": "did you mean 'optim.lr'",
    "train model=resnet18": "torchvision's is 'torchvision:resnet18'",
    "train model=torchvision:resnt50": "did you mean 'torchvision:resnet50'",
    "train optim=sdg": "no such option",
    "train trainer.max_epochs=0": "expected a whole number >= 1",
    "train trainer.accelerator=cuda0": "did you mean 'cuda'",
    "train precision.trainer=bf16": "did you mean 'bf16-mixed'",
    "train data=imagefolder": "data.root is needed: give data.root=DIR, the folder above train",
    "train callbacks.ema={decey:0.9}": "did you mean 'callbacks.ema.decay'",
    "train callbacks.private={epsilonn:8}": "did you mean 'callbacks.private.epsilon'",
    "train +callbacks.drift.every=1": "did you mean 'callbacks.drift.every_n_steps'",
    "train +callbacks.emma={}": "did you mean 'callbacks.ema'",
    "train callbacks.ema=0.9": "expected options in braces and quotes",
    "train +model.dropuot=0.1": "did you mean 'model.dropout'",
    "train +model.reversible_bit=4": "there is name, ",  # not for a RevNet
    "train optim.name=sdg": "did you mean 'sgd'",
    "train +optim.nesterv=true": "did you mean 'optim.nesterov'",
    "train +data.batch_sise=8": "did you mean 'data.batch_size'",
    "train data=imagefolder data.root=x +data.cache_byte=8": "did you mean 'data.cache_bytes'",
    "train data._target_=revzoo.data.Digit": "did you mean 'revzoo.data.Digits'",
    "train +trainer.max_epoch=2": "did you mean 'trainer.max_epochs'",
    "train trainer.profiler=simpl": "did you mean 'simple'",
    "train +logger.projekt=x": "no option 'logger.projekt'",
    "train logger.kind=tensorbord": "did you mean 'tensorboard'",
    "train --resume nowhere": "there is no",
    "train --auto-resume": "add hydra.run.dir=RUN_DIR",
    "train --auto-resume -m seed=0,1": "leave out -m",
    "train --resume nowhere --auto-resume": "leave the option out",
    "train hydra.run.dir=used": "already holds a run: resume it with --resume",
    "train hydra.run.dir=/dev/null/run": "/dev/null/run/config.yaml cannot be written",
    "train data=table data.table=x.xls": "data.table=x.xls: expected one of .csv, .tsv, .parquet",
    "train data=table data.table=nowhere.csv": "nowhere.csv does not exist: set data.table=FILE",
    "train data.fold=2": "the images have no folds: add data.folds=5",
    "train data.folds=3 data.fold=3": "expected 0 to 2, one of data.folds=3",
    "train trainer.deterministic=maybe": "expected one of true, false, warn, null",
    "train data=imagefolder data.root=nowhere": "nowhere does not exist: set data.root=DIR",
    "train data=masks data.root=nowhere": "nowhere does not exist: set data.root=DIR, ",
    "train data=masks data.table=nowhere.csv": "nowhere.csv does not exist: set data.table=FILE",
    "train data=volumes data.root=empty": "empty is empty: set data.root=DIR, the folder above",
    "train data=litdata data.root=empty": "empty is empty: set data.root=DIR, the output of revzoo",
    # names of other programs
    "train aa=rand-m9": "use data.augment.policy=rand-m9",
    "train data.augment.color_jitter=0.4": "use data.augment.color=0.4",
    "train clip_grad=1": "trainer.gradient_clip_val",
    "train ckpt_path=x": "--resume RUN",
    "train optim.schedule=cosine": "optim.schedule.name=cosine",
    "train debug=null": "leave debug out",
    "train hydra.run.dir=": "expected a value after =",
    "sweep dir= optim.lr=interval(0.1,1)": "expected a value after =",
    "train data.batch_size=0": "data.batch_size=0: expected a whole number >= 1",
    "train memory=budget": "memory.bytes is needed: give memory.bytes=4GiB",
    "train model.num_classes=7": "model.num_classes cannot be set",
    "check images": "expected revzoo check DIR",
    "check ./images": "there is no folder",
    "train --lr 0.1": "did you mean 'optim.lr'",
    "eval ckpt=revnet38.cifar10 split=train": "split=train: expected one of test, val",
    "eval data=cifar10": "ckpt is needed",
    "predict revnet38.cifar10 empty": "no images in empty: the folder is empty",
    "predict revnet38.cifr10 .": "did you mean 'revnet38.cifar10'",
    "eval ckpt=nowhere.ckpt": "no weights, file or folder 'nowhere.ckpt'",
    "train modle=x": "did you mean 'model'",
    "train model=revnet39 -m": "did you mean 'revnet38'",
    "train --resume nowhere optim.lr=1": "there is no",
    "eval ckpt=x splt=val": "did you mean 'split'",
    "eval model=x": "expected one of the keys of an evaluation, ckpt,",
    "eval ckpt_path=a.ckpt": "did you mean 'ckpt'",
    "sweep trails=2": "did you mean 'trials'",
    "sweep optim.lrr=interval(0,1)": "did you mean 'optim.lr'",
    "predict revnet38.cifar10 nowhere.png": "there is no image",
    "info revnet39": "did you mean 'revnet38'",
    "info revnet38.cifar": "did you mean 'revnet38.cifar10'",
    "info .": "holds no run and no weights",
    "audit revnet39": "did you mean 'revnet38'",
    "bench revnet38 revnet39": "did you mean 'revnet38'",
    "plan revnet39 --budget 1GiB": "did you mean 'revnet38'",
    "plan revnet38 --budget 1x": "expected a positive number of bytes",
    "export revnet39": "no weights, file or folder 'revnet39'",
    "export .": "holds no run and no weights",
    # Hydra's section
    "train +hydra.callbacks.x._target_=evil.f": "expected one of Hydra's keys",
    "train --config-name other +experiment@hydra.callbacks=x": "experiment=x: no such option",
    "train --config-name other +hydra={callbacks:{x:{_target_:evil.f}}}": "one of Hydra's keys",
    "train -m hydra.sweeper._target_=evil.f seed=0,1": "expected one of Hydra's keys",
    # options of other programs
    "train trainer.precision=bf16-mixed": "use precision=bf16",
    "train +trainer.precision=16": "use precision=fp16",
    "train precision=bf16-mixed": "use precision=bf16",
    "train optim=sgd": "use optim=onecycle, cosine or step",
    "train --weight-decay=0.1 seed=1": "did you mean 'optim.weight_decay'",
    "train ckpt_path=a.ckpt": "use model.checkpoint_path=a.ckpt for its weights; train --resume",
    "train --amp model=revnet56": "amp=true: there is no option 'amp'; use precision=bf16",
    "train model = revnet38": "model: expected KEY=VALUE without spaces",
    "train revnet56": "did you mean model=revnet56?",
    "train .": "did you mean data=imagefolder data.root='.'?",
    "train -m seed=1,2 --cfg job": "leave out -m",
    "train +experiment=finetune": "write experiment=NAME without +",
    "train data=..": "use data=imagefolder data.root='..'",
    "train --scheduler step": "use optim=step",
    # these print their answer themselves
    "tarin": "2",
    "options optim": "None",
    "train --cfg job": "None",
}
WITHOUT_LIGHTNING = {
    "train trainer=cpu +trainer.sync_batchnorm=true": "needs GPUs, this run is on the CPU",
    "train precision=fp16 trainer=cpu": "needs a GPU, this run is on the CPU: use precision=fp32",
    "audit torchvision:resnt50": "did you mean 'torchvision:resnet50'",
}

RUN = """
import contextlib, io, sys
from revzoo.cli.main import main
for line in sys.argv[2:]:
    code = None
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            main(line.split())
        except SystemExit as error:
            code = error.code
    print(code)
    imported = [name for name in sys.argv[1].split(",") if name in sys.modules]
    assert not imported, f"{line} imports {imported}"
"""


@pytest.mark.parametrize(
    ("lines", "slow"),
    [
        (WITHOUT_TORCH, "torch,torchvision,pytorch_lightning"),
        (WITHOUT_LIGHTNING, "pytorch_lightning,torchvision,torchmetrics,matplotlib"),
    ],
)
def test_slow_libraries_are_not_imported(lines: dict[str, str], slow: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", RUN, slow, *lines]
    (tmp_path / "empty").mkdir()
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "config.yaml").touch()
    wide = os.environ | {"COLUMNS": "1000"}  # an answer is one line
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env=wide, check=False
    )
    assert done.returncode == 0, done.stderr
    for answer, (line, expected) in zip(done.stdout.splitlines(), lines.items(), strict=True):
        assert expected in answer, line


@pytest.mark.parametrize("suffix", [".pt2", ".onnx"])
def test_an_exported_program_is_named(suffix: str, tmp_path: Path) -> None:
    (tmp_path / f"net{suffix}").write_bytes(b"PK")
    with pytest.raises(SystemExit, match=r"is an exported program.*give the checkpoint or weights"):
        main(["predict", str(tmp_path / f"net{suffix}"), str(tmp_path)])


def test_a_runs_folder_has_no_colon() -> None:
    whole = compose(["model=torchvision:resnet18"]).whole
    assert str(whole.hydra.run.dir).startswith("outputs/torchvision-resnet18-digits/")
