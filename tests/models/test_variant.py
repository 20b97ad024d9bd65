import pytest

from revzoo.models.variant import UnitPlan, Variant

SMALL = {"stem_width": 8, "widths": (8, 16), "units": (2, 1), "strides": (1, 2)}


def test_plans_change_width_and_stride_at_the_first_unit_of_a_stage():
    plans = Variant(**SMALL).stages(dropout=0.1)
    assert plans == [
        [UnitPlan(8, 8, 1, "basic", False, 0.1), UnitPlan(8, 8, 1, "basic", True, 0.1)],
        [UnitPlan(8, 16, 2, "basic", True, 0.1)],
    ]


def test_a_bottleneck_multiplies_the_stages_but_not_the_stem():
    first, *_ = Variant(**SMALL, branch="bottleneck").stages()[0]
    assert (first.in_channels, first.out_channels) == (8, 32)


@pytest.mark.parametrize(
    ("plan", "keeps"),
    [
        (UnitPlan(8, 8, 1, "basic", True, 0.0), True),
        (UnitPlan(8, 8, 2, "basic", True, 0.0), False),
        (UnitPlan(8, 16, 1, "basic", True, 0.0), False),
    ],
)
def test_a_unit_keeps_its_shape_only_at_stride_one_and_equal_width(plan, keeps):
    assert plan.keeps_shape is keeps


def test_a_stream_has_its_share_of_the_channels():
    plan = UnitPlan(8, 16, 2, "basic", False, 0.1)
    assert plan.per_stream(2) == UnitPlan(4, 8, 2, "basic", False, 0.1)


@pytest.mark.parametrize("plan", [(7, 8), (8, 7)])
def test_channels_that_do_not_split_are_refused(plan):
    with pytest.raises(ValueError, match=r"channels=7: expected a multiple of 2, for 2"):
        UnitPlan(*plan, 1, "basic", True, 0.0).per_stream(2)


def test_sequences_become_tuples():
    assert Variant(**{**SMALL, "units": [2, 1]}) == Variant(**SMALL)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"units": (1,)}, "expected one value of each per stage"),
        ({"units": (1, 0)}, r"units=\(1, 0\)"),
        ({"units": 3}, "units=3"),
        ({"widths": (8.0, 16.0)}, "widths="),
        ({"strides": ()}, r"strides=\(\)"),
        ({"stem_width": 0}, "stem_width=0"),
        ({"branch": "plain"}, "plain.*basic, bottleneck"),
    ],
)
def test_fields_out_of_range_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Variant(**{**SMALL, **change})


@pytest.mark.parametrize(
    ("change", "multiple"),
    [({}, 2), ({"branch": "bottleneck"}, 1), ({"downsampling_stem": True}, 8)],
)
def test_only_pooling_shortcuts_restrict_the_image_size(change, multiple):
    assert Variant(**SMALL, **change).size_multiple == multiple


def test_dropping_of_branches_rises_linearly_over_all_units():
    plans = Variant(**SMALL).stages(drop_path_rate=0.4)
    assert [[plan.drop_path for plan in stage] for stage in plans] == [[0.0, 0.2], [0.4]]


def test_reductions_multiply_up():
    assert Variant(**SMALL).reductions == (1, 2)
    assert Variant(**SMALL, downsampling_stem=True).reductions == (4, 8)
