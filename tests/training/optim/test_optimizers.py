import copy
import pickle
import sys
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import revzoo
from revzoo.models import create_model
from revzoo.training.optim import optimizers
from revzoo.training.optim.optimizers import (
    OptimSpec,
    build_optimizer,
    build_schedule,
    split_weights,
)


def names(model: nn.Module, group: dict[str, object]) -> set[str]:
    wanted = {id(p) for p in group["params"]}  # type: ignore[attr-defined]
    return {name for name, p in model.named_parameters() if id(p) in wanted}


def net() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2), nn.PReLU()
    )


def test_only_convolution_and_linear_weights_decay() -> None:
    model = net()
    decayed, others = build_optimizer(model, OptimSpec(weight_decay=0.5)).param_groups
    assert names(model, decayed) == {"0.weight", "3.weight"}
    assert names(model, others) == {"0.bias", "1.weight", "1.bias", "3.bias", "4.weight"}
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.5, 0.0)


def test_all_parameters_decay_on_demand() -> None:
    groups = build_optimizer(net(), OptimSpec(weight_decay=0.5, decay_all=True)).param_groups
    assert [group["weight_decay"] for group in groups] == [0.5, 0.5]
    assert sum(len(group["params"]) for group in groups) == 7


@pytest.mark.parametrize("name", ["revnet38", "resnet32"])
def test_every_parameter_of_a_model_is_in_one_group(name: str) -> None:
    model = create_model(name)
    decayed, others = build_optimizer(model, OptimSpec()).param_groups
    assert names(model, decayed) | names(model, others) == {n for n, _ in model.named_parameters()}
    assert not names(model, decayed) & names(model, others)
    assert all(p.ndim > 1 for p in decayed["params"])
    assert all(p.ndim == 1 for p in others["params"])


def test_decay_moves_only_the_decayed_weights() -> None:
    model = net()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    spec = OptimSpec(lr=0.1, weight_decay=0.5, nesterov=False, momentum=0.0)
    optimizer = build_optimizer(model, spec)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for name, p in model.named_parameters():
        factor = 0.95 if name in ("0.weight", "3.weight") else 1.0
        torch.testing.assert_close(p.detach(), before[name] * factor)


def test_frozen_parameters_are_left_out() -> None:
    model = net()
    model[0].requires_grad_(False)
    groups = build_optimizer(model, OptimSpec()).param_groups
    assert not any(name.startswith("0.") for group in groups for name in names(model, group))
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="unfreeze some of them"):
        build_optimizer(model, OptimSpec())


def test_a_shared_weight_is_in_one_group() -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    weights, others = split_weights(nn.Sequential(first, second))
    assert (len(weights), len(others)) == (1, 2)


def test_optimizer_is_nesterov_sgd() -> None:
    optimizer = build_optimizer(net(), OptimSpec(lr=0.3, momentum=0.8))
    assert isinstance(optimizer, torch.optim.SGD)
    for group in optimizer.param_groups:
        assert (group["lr"], group["momentum"], group["nesterov"]) == (0.3, 0.8, True)


def test_schedule_moves_both_groups() -> None:
    spec = OptimSpec(schedule={"name": "step", "milestones": [0.5]})
    optimizer = build_optimizer(net(), spec)
    schedule = build_schedule(optimizer, spec, total_steps=2)
    optimizer.step()
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.01, 0.01])


def test_spec_from_plain_and_back() -> None:
    plain = {"lr": 0.5, "schedule": {"name": "step", "milestones": [0.5]}}
    spec = OptimSpec.of(plain)
    assert spec.lr == 0.5
    assert OptimSpec.of(spec) is spec
    assert OptimSpec.of(None) == OptimSpec()
    assert OptimSpec.of(spec.plain()) == spec
    assert pickle.loads(pickle.dumps(spec.plain())) == spec.plain()


@pytest.mark.parametrize(
    ("plain", "message"),
    [
        ({"lrr": 1}, r"optim\.lrr: no such option; did you mean 'lr'"),
        ({"lr": 0}, "optim.lr=0"),
        ({"lr": float("inf")}, "optim.lr=inf"),
        ({"momentum": 1}, "optim.momentum=1"),
        ({"momentum": 0.0}, "needs optim.momentum > 0"),
        ({"weight_decay": -1}, "optim.weight_decay=-1"),
        ({"layer_decay": 0.0}, "optim.layer_decay=0"),
        ({"layer_decay": 1.5}, "optim.layer_decay=1.5"),
        ({"label_smoothing": 1.0}, "optim.label_smoothing=1"),
        ({"class_weights": "balancd"}, "expected null, .* did you mean 'balanced'"),
        ({"class_weights": 2}, "optim.class_weights=2: expected a string or a list or null"),
        ({"class_weights": [1, -1]}, r"class_weights=\[1, -1\]: expected numbers > 0"),
        ({"class_weights": [0, 1]}, "expected numbers > 0"),
        ({"class_weights": [1, float("nan")]}, "expected numbers > 0"),
        ({"class_weights": [1, "a"]}, "expected numbers > 0"),
        ({"schedule": {"name": "x"}}, "schedule.name=x"),
    ],
)
def test_wrong_options_are_refused(plain: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OptimSpec.of(plain)


def test_muon_takes_the_hidden_weights_and_leaves_the_rest_to_sgd() -> None:
    model = net()
    spec = OptimSpec(name="muon", lr=0.03, sgd_lr=0.2, weight_decay=0.5)
    hidden, rest = build_optimizer(model, spec).param_groups
    assert names(model, hidden) == {"0.weight"}
    assert (hidden["lr"], hidden["weight_decay"], hidden["orthogonal"]) == (0.03, 0.5, True)
    assert (rest["lr"], rest["weight_decay"], rest["orthogonal"]) == (0.2, 0.0, False)


@pytest.mark.parametrize("frozen", [False, True])
def test_muon_leaves_every_classifier_to_sgd(frozen: bool) -> None:
    """One of two classifiers was orthogonalised; without one, the last hidden weight was not."""
    pytest.importorskip("timm")
    model = create_model("timm:deit_tiny_distilled_patch16_224", num_classes=3, img_size=32)
    for path in model.classifiers:
        model.get_submodule(path).requires_grad_(not frozen)
    spec = OptimSpec(name="muon", lr=0.03, sgd_lr=0.2)
    hidden, rest = build_optimizer(model, spec).param_groups
    heads = {"net.head.weight", "net.head_dist.weight"}
    assert names(model, rest) & heads == (set() if frozen else heads)
    weights = {id(p) for p in split_weights(model)[0]}
    assert {id(p) for p in hidden["params"]} == {
        id(p) for name, p in model.named_parameters() if id(p) in weights and name not in heads
    }


@pytest.mark.parametrize(
    "options",
    [
        {"name": "muon"},
        {"sgd_lr": 0.1},
        {"name": "adam"},
        {"name": "muon", "sgd_lr": 0.1, "decay_all": True},
        {"decay_all": 1},
    ],
)
def test_impossible_optimisers_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"optim\.(sgd_lr|name|decay_all)=.*expected"):
        OptimSpec.of(options)


RATES = {"fc": 1.0, "stages.2": 0.5, "stages.1": 0.25, "stages.0": 0.125, "stem": 0.0625}


@pytest.mark.parametrize("options", [{}, {"name": "muon", "sgd_lr": 3.0}])
def test_rates_fall_by_depth_and_nothing_else_changes(options: dict[str, object]) -> None:
    model = create_model("revnet38", units=(1, 1, 1))

    def settings(layer_decay: float) -> dict[str, dict[str, object]]:
        spec = OptimSpec(**options, lr=2.0, layer_decay=layer_decay)  # type: ignore[arg-type]
        return {
            name: {k: v for k, v in group.items() if k not in ("params", "name")}
            for group in build_optimizer(model, spec).param_groups
            for name in names(model, group)
        }

    plain, decayed = settings(1.0), settings(0.5)
    assert plain.keys() == decayed.keys() == {name for name, _ in model.named_parameters()}
    for name, group in decayed.items():
        part = "stages.2" if name.startswith("norm") else name
        (rate,) = [rate for key, rate in RATES.items() if part.startswith(key)]
        assert group == {**plain[name], "lr": plain[name]["lr"] * rate}  # type: ignore[operator]


@pytest.mark.parametrize("name", ["step", "onecycle", "cosine"])
def test_schedules_keep_the_ratio_of_rates(name: str) -> None:
    schedule = {"name": name, **({} if name == "step" else {"end": 0.1})}
    spec = OptimSpec(lr=1.0, layer_decay=0.1, schedule=schedule)
    optimizer = build_optimizer(create_model("revnet38", units=(1, 1, 1)), spec)
    groups = {group["name"]: group for group in optimizer.param_groups}
    scheduler = build_schedule(optimizer, spec, total_steps=10)
    for _ in range(10):
        rates = groups["fc/weights"]["lr"], groups["stem/weights"]["lr"]
        assert rates[1] == pytest.approx(rates[0] * 1e-4)
        optimizer.step()
        scheduler.step()


def test_rates_by_depth_need_a_model_whose_order_is_known() -> None:
    with pytest.raises(ValueError, match=r"Sequential is not an ImageNetwork.*create_model"):
        build_optimizer(net(), OptimSpec(layer_decay=0.5))


def test_a_registered_optimiser_is_selected_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizers, "OPTIMIZERS", dict(optimizers.OPTIMIZERS))
    revzoo.register_optimizer("nadam", torch.optim.NAdam)
    spec = OptimSpec(name="nadam", lr=0.01, weight_decay=0.5)
    optimizer = build_optimizer(net(), spec)
    assert isinstance(optimizer, torch.optim.NAdam)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.0]
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.01]
    with pytest.raises(
        ValueError, match="optimiser 'sgd' is already registered: choose another name"
    ):
        revzoo.register_optimizer("sgd", torch.optim.NAdam)
    with pytest.raises(TypeError, match="name=3: expected a string, which selects the optimiser"):
        revzoo.register_optimizer(3, torch.optim.NAdam)  # type: ignore[arg-type]


def test_adamw_is_torchs_and_decays_only_weights():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    twin = copy.deepcopy(model)
    spec = OptimSpec(name="adamw", lr=0.01, weight_decay=0.5, momentum=0.0)  # no Nesterov
    optimizer = build_optimizer(model, spec)
    expected = torch.optim.AdamW(
        [
            {"params": [twin[0].weight], "weight_decay": 0.5},
            {"params": [twin[0].bias, *twin[1].parameters()], "weight_decay": 0.0},
        ],
        lr=0.01,
    )
    x = torch.randn(8, 4)
    for net, steps in ((model, optimizer), (twin, expected)):
        for _ in range(3):
            steps.zero_grad()
            net(x).square().sum().backward()
            steps.step()
    assert all(map(torch.equal, model.parameters(), twin.parameters()))


def test_lamb_moves_each_weight_in_proportion_to_its_norm() -> None:
    pytest.importorskip("timm")
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with torch.no_grad():
        model[1].weight.mul_(100)
    optimizer = build_optimizer(model, OptimSpec(name="lamb", lr=0.01, weight_decay=0.02))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.02, 0]
    before = [layer.weight.detach().clone() for layer in model]
    model(torch.randn(8, 4)).square().sum().backward()
    optimizer.step()
    for layer, start in zip(model, before, strict=True):
        assert float((layer.weight.detach() - start).norm() / start.norm()) == pytest.approx(
            0.01, rel=1e-4
        )


def test_lamb_without_timm_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm.optim.lamb", None)
    with pytest.raises(ValueError, match=r"optim.name=lamb needs the package timm: pip install"):
        build_optimizer(net(), OptimSpec(name="lamb"))


def test_a_networks_own_parameters_are_optimised_with_rates_by_depth() -> None:
    """A parameter beside stem, stages and classifier was in no group."""
    model = create_model("revnet38", units=(1, 1, 1))
    model.temperature = nn.Parameter(torch.ones(()))
    optimizer = build_optimizer(model, OptimSpec(layer_decay=0.9))
    ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert ids == {id(p) for p in model.parameters()}


def test_attention_is_decayed() -> None:
    """The weight of its three projections was not, and Muon did not orthogonalise it."""
    attention = nn.MultiheadAttention(4, 2)
    weights, _ = split_weights(attention)
    assert {id(w) for w in weights} == {
        id(attention.in_proj_weight),
        id(attention.out_proj.weight),
    }


def normalised(layer: nn.Module) -> None:
    parametrizations.weight_norm(layer)


def pruned(layer: nn.Module) -> None:
    prune.l1_unstructured(layer, "weight", 0.5)


@pytest.mark.parametrize(
    ("compute", "number"),
    [(normalised, 4), (pruned, 2), (parametrizations.spectral_norm, 2)],
)
def test_computed_weights_decay(compute: Callable[[nn.Module], None], number: int) -> None:
    """Nothing decayed, and with Muon SGD trained all weights, without a word."""
    model = net()
    for layer in (model[0], model[3]):
        compute(layer)
    weights, others = split_weights(model)
    assert len(weights) == number
    assert names(model, {"params": others}) == {
        "0.bias",
        "1.weight",
        "1.bias",
        "3.bias",
        "4.weight",
    }


def test_muon_refuses_weights_computed_from_several_parameters() -> None:
    model = net()
    normalised(model[0])
    with pytest.raises(ValueError, match=r"0\.weight computed from 2 parameters.*use sgd or adamw"):
        build_optimizer(model, OptimSpec(name="muon", sgd_lr=0.1))
    model = net()
    pruned(model[0])
    assert names(model, build_optimizer(model, OptimSpec(name="muon", sgd_lr=0.1)).param_groups[0])
