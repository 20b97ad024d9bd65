import pytest
import pytorch_lightning as pl
import torch
from small_task import TINY, Fails, TinyNet, loader, trainer
from torch import nn

from revzoo.training import BatchNormMomentum, Classifier, CompiledBranches
from revzoo.training.callbacks.compiled_branches import compiled_parts

OPTIM = {"lr": 0.01, "schedule": {"name": "constant"}}


class Momenta(pl.Callback):
    """Records the momenta of all BatchNorms at each training batch."""

    def __init__(self, kind=nn.BatchNorm2d):
        self.kind = kind
        self.values = []

    def on_train_batch_end(self, trainer, pl_module, *args):
        norms = [m for m in pl_module.modules() if isinstance(m, self.kind)]
        self.values.append({norm.momentum for norm in norms})


def test_momentum_one_keeps_the_statistics_of_the_last_batch(tmp_path):
    module = Classifier(TinyNet(), optim=OPTIM)
    net = module.model
    with torch.no_grad():
        net.body[0].weight.zero_()  # the batch's mean is the bias
        net.body[0].bias.copy_(torch.arange(4.0))
    net.body[0].requires_grad_(False)
    callbacks = [BatchNormMomentum(momentum=1.0)]
    trainer(tmp_path, max_epochs=1, callbacks=callbacks).fit(module, loader())
    assert torch.equal(net.body[1].running_mean, torch.arange(4.0))


@pytest.mark.parametrize("memory", ["store", "invert"])
def test_every_batch_norm_gets_the_momentum(tmp_path, memory):
    module = Classifier({**TINY, "memory": memory}, optim=OPTIM)
    norms = [m for m in module.modules() if isinstance(m, nn.BatchNorm2d)]
    seen = Momenta()
    callbacks = [BatchNormMomentum(momentum=0.1, warmup=False), seen]
    trainer(tmp_path, max_epochs=1, callbacks=callbacks).fit(module, loader())
    assert seen.values == [{0.1}] * 4
    for norm in norms:
        assert norm.momentum == 0.01  # restored
        assert norm.running_var is not None
        # after four batches, at least 0.9 ** 4 of the initial variance is left
        assert (norm.running_var >= 0.9**4 - 1e-6).all()
        assert not torch.allclose(norm.running_var, torch.ones(()), atol=1e-3)


@pytest.mark.parametrize(
    ("momentum", "expected"),
    [(None, [9 / (10 + t) for t in range(8)]), (0.7, [0.9, 9 / 11, 0.75, *[0.7] * 5])],
)
def test_a_warm_up_ends_at_the_momentum(tmp_path, momentum, expected):
    module, seen = Classifier(TINY, optim=OPTIM), Momenta()
    callbacks = [BatchNormMomentum(momentum=momentum), seen]
    trainer(tmp_path, max_epochs=2, callbacks=callbacks).fit(module, loader())
    assert seen.values == [{value} for value in expected]


def test_a_resumed_run_continues_its_warm_up(tmp_path):
    first = trainer(tmp_path, max_epochs=1, callbacks=[BatchNormMomentum()])
    first.fit(Classifier(TINY, optim=OPTIM), loader())
    first.save_checkpoint(tmp_path / "last.ckpt")
    module, seen = Classifier(TINY, optim=OPTIM), Momenta()
    second = trainer(tmp_path, max_epochs=2, callbacks=[BatchNormMomentum(), seen])
    second.fit(module, loader(), ckpt_path=tmp_path / "last.ckpt", weights_only=True)
    assert seen.values == [{9 / (10 + t)} for t in range(4, 8)]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # of Dynamo
def test_compiled_branches_have_no_warm_up(tmp_path, caplog):
    module, seen = Classifier(TINY, optim=OPTIM), Momenta()
    callbacks = [BatchNormMomentum(), CompiledBranches(backend="eager"), seen]
    trainer(tmp_path, max_epochs=1, limit_train_batches=1, callbacks=callbacks).fit(
        module, loader()
    )
    compiled = compiled_parts(module.model)
    inside = {m for part in compiled for m in part.modules() if isinstance(m, nn.BatchNorm2d)}
    outside = {m for m in module.modules() if isinstance(m, nn.BatchNorm2d)} - inside
    assert inside
    assert outside
    assert seen.values == [{0.01, 0.9}]
    assert "BatchNorms of compiled parts get no warm-up" in caplog.text


def test_synchronised_batch_norms_get_the_momentum(tmp_path):
    """``sync_batchnorm`` inserts them after the callbacks' setup."""

    class Converts(pl.Callback):
        def on_fit_start(self, trainer, pl_module):
            pl_module.model = nn.SyncBatchNorm.convert_sync_batchnorm(pl_module.model)

    module, seen = Classifier(TinyNet(), optim=OPTIM), Momenta(nn.SyncBatchNorm)
    callbacks = [Converts(), BatchNormMomentum(momentum=0.5, warmup=False), seen]
    trainer(tmp_path, max_epochs=1, callbacks=callbacks).fit(module, loader())
    assert seen.values == [{0.5}] * 4
    assert {m.momentum for m in module.modules() if isinstance(m, nn.SyncBatchNorm)} == {0.1}


def test_a_batch_norm_that_averages_all_batches_is_unchanged(tmp_path):
    module, seen = Classifier(TinyNet(), optim=OPTIM), Momenta()
    for norm in module.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.momentum = None
    trainer(tmp_path, max_epochs=1, callbacks=[BatchNormMomentum(momentum=0.5), seen]).fit(
        module, loader()
    )
    assert seen.values == [{None}] * 4


def test_the_momentum_is_restored_when_a_run_fails(tmp_path):
    module = Classifier(TINY, optim=OPTIM)
    run = trainer(tmp_path, max_epochs=1, callbacks=[BatchNormMomentum(momentum=0.5), Fails()])
    with pytest.raises(RuntimeError, match="on purpose"):
        run.fit(module, loader())
    momenta = {m.momentum for m in module.modules() if isinstance(m, nn.BatchNorm2d)}
    assert momenta == {0.01}


@pytest.mark.parametrize("momentum", [0, -0.1, 1.5, True])
def test_a_wrong_momentum_is_refused(momentum):
    with pytest.raises(ValueError, match=r"momentum=.*expected a number in"):
        BatchNormMomentum(momentum=momentum)
