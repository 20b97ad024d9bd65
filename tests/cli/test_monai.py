"""The module of docs/how-to/move-from-monai.md: MONAI's network and transforms in every command."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from revzoo.cli.main import main
from revzoo.data.augment import POLICIES
from revzoo.models.registry import MODELS

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "move-from-monai.md"


@pytest.mark.filterwarnings("ignore")  # of MONAI
def test_the_module_of_the_page_trains_evaluates_and_predicts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("monai")
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (module,) = (block for block in blocks if "register_model" in block)
    (tmp_path / "mymonai.py").write_text(module)
    monkeypatch.setenv("REVZOO_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    for n, split in enumerate(("train", "train", "val")):
        mask = (random.random((16, 16, 16)) > 0.8).astype(np.uint8)
        for part, volume in (("images", mask * 100), ("labels", mask)):
            path = tmp_path / "set" / split / part / f"{n}.npy"
            path.parent.mkdir(parents=True, exist_ok=True)
            np.save(path, volume)
    data = ["data=volumes", "data.root=set", "data.patch=[16,16,16]", "data.batch_size=2"]
    data += ["data.num_workers=0", "data.augment.policy=monai", "test=false"]
    model = ["model=dyn_unet", "model.filters=[4,8,8]", "optim=adamw", "trainer.max_epochs=1"]
    own, here = ["--import", "mymonai"], ["trainer=cpu", "logger=none"]
    with patch.dict(MODELS), patch.dict(POLICIES):
        main(["train", *own, *model, *data, *here, "hydra.run.dir=run"])
        main(["eval", *own, "run", "split=val", "trainer=cpu"])
        assert "val/dice" in capsys.readouterr().out
        main(["predict", *own, "run", "set/val/images", "--masks", "masks", "--device", "cpu"])
    assert np.load(tmp_path / "masks" / "2.npy").shape == (16, 16, 16)
    sys.modules.pop("mymonai")
