"""The README's example of weights and feature maps runs as it stands, and gives what it says."""

from functools import partial
from pathlib import Path

import pytorch_lightning as pl

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_the_section_on_weights_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    section = README.split("### Pretrained weights and feature maps")[1]
    code = section.split("```python\n")[1].split("```")[0]
    names: dict[str, object] = {}
    exec("import torch, revzoo\n" + code, names)
    assert capsys.readouterr().out == "[32, 112] [1, 4]\n"
    assert names["shallow"].shape == (2, 32, 32, 32)
    assert names["deep"].shape == (2, 112, 8, 8)


def test_the_section_on_fine_tuning_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = README.split("### Fine-tuning")[1].split("```python\n")[1].split("```")[0]
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    monkeypatch.setattr(pl, "Trainer", partial(pl.Trainer, **quiet))
    names: dict[str, object] = {}
    exec(code, names)
    assert names["trainer"].state.finished
    assert names["trainer"].current_epoch == 3
    assert names["trainer"].optimizers[0].param_groups[-1]["name"] == "stem/pg2"
