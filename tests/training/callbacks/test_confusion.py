import csv
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from several_processes import free_ports
from small_task import TinyNet, halves, loader, trainer
from torch.utils.data import DataLoader
from two_processes import start

from revzoo.data import Digits
from revzoo.training import Classifier, ConfusionMatrix

OPTIM = {"lr": 0.05, "schedule": {"name": "constant"}}


def table(path):
    with path.open(newline="") as file:
        head, *rows = list(csv.reader(file))
    assert [row[0] for row in rows] == head[1:]
    return head[1:], [[int(value) for value in row[1:]] for row in rows]


def counted(module, batches):
    """The confusion matrix, counted in a loop."""
    count = [[0, 0], [0, 0]]
    with torch.no_grad():
        for images, labels in batches:
            for true, guess in zip(labels, module.eval()(images).argmax(1), strict=True):
                count[int(true)][int(guess)] += 1
    return count


def test_counts_come_from_the_last_weights(tmp_path):
    confusion = ConfusionMatrix(tmp_path / "run" / "confusion.csv", every_n_epochs=2)
    module = Classifier(TinyNet(), optim=OPTIM)
    val = loader(40, seed=1)
    trainer(tmp_path, max_epochs=3, callbacks=[confusion]).fit(module, loader(), val)
    names, counts = table(confusion.path)
    assert names == ["0", "1"]
    assert counts == counted(module, val)
    assert sum(map(sum, counts)) == 40
    assert [path.name for path in confusion.path.parent.iterdir()] == ["confusion.csv"]


def test_classes_have_their_names(tmp_path):
    confusion = ConfusionMatrix(str(tmp_path / "confusion.csv"))
    spec = {"name": "irevnet13", "num_classes": 10, "in_chans": 1, "units": [1, 1]}
    options = {"max_epochs": 1, "limit_train_batches": 1}
    runner = trainer(tmp_path, callbacks=[confusion], **options)
    runner.fit(Classifier(spec, optim=OPTIM), datamodule=Digits())
    names, counts = table(confusion.path)
    assert names == [str(digit) for digit in range(10)]
    assert sum(map(sum, counts)) == 144


def test_mixed_labels_count_as_their_largest_class(tmp_path):
    class Shares(torch.utils.data.Dataset[Any]):
        def __len__(self):
            return 6

        def __getitem__(self, index):
            return torch.zeros(1, 8, 8), torch.tensor([0.4, 0.6])

    confusion = ConfusionMatrix(tmp_path / "confusion.csv")
    runner = trainer(tmp_path, max_epochs=1, callbacks=[confusion])
    runner.fit(Classifier(TinyNet(), optim=OPTIM), loader(), DataLoader(Shares(), batch_size=4))
    (nothing, taken) = table(confusion.path)[1]
    assert nothing == [0, 0]
    assert sum(taken) == 6


def _one_of_two(rank, port, folder):
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE="2", NODE_RANK=str(rank)
    )
    torch.set_num_threads(1)
    torch.manual_seed(0)
    confusion = ConfusionMatrix(Path(folder) / f"confusion{rank}.csv", every_n_epochs=1)
    module = Classifier(TinyNet(), optim=OPTIM)
    options = {"strategy": "ddp", "devices": 1, "num_nodes": 2, "max_epochs": 1}
    runner = trainer(Path(folder), callbacks=[confusion], **options)
    runner.fit(module, loader(), DataLoader(halves(41, 1), batch_size=16))
    val = float(runner.callback_metrics["val/acc"])
    (figures,) = runner.test(module, DataLoader(halves(41, 1), batch_size=16), verbose=False)
    found = (module.state_dict(), val, figures)
    torch.save(found, Path(folder) / f"{rank}.pt")
    sys.stdout.flush()
    os._exit(0)  # torch's threads may outlive the interpreter, which then aborts now and then


@pytest.mark.timeout(300)
def test_two_processes_count_each_image_once_and_only_the_first_writes(tmp_path):
    start(_one_of_two, *free_ports(1), str(tmp_path))
    assert not (tmp_path / "confusion1.csv").exists()
    _, counts = table(tmp_path / "confusion0.csv")
    weights, val, test = torch.load(tmp_path / "0.pt")
    module = Classifier(TinyNet())
    module.load_state_dict(weights)
    assert counts == counted(module, DataLoader(halves(41, 1), batch_size=16))  # 41 is odd
    right = sum(counts[i][i] for i in range(2)) / 41
    assert val == pytest.approx(right)
    assert test["test/acc"] == pytest.approx(right)
    images, labels = next(iter(DataLoader(halves(41, 1), batch_size=41)))
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(module.eval()(images), labels)
    assert test["test/loss"] == pytest.approx(float(loss), rel=1e-5)


def test_a_full_disk_does_not_end_the_run(tmp_path, monkeypatch, caplog):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("revzoo.training.callbacks.pictures.replacing_table", full)
    path = tmp_path / "confusion.csv"
    runner = trainer(tmp_path, callbacks=[ConfusionMatrix(path, every_n_epochs=1)])
    runner.fit(Classifier(TinyNet()), loader(), loader())
    assert runner.current_epoch == 2
    assert "No space left on device" in caplog.text
