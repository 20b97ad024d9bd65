"""The names of a run's figures, their order, and which are better if low; imports no torch."""

SURFACES = ("assd", "hd95")  # of evaluations with surface_distances=true
ORDER = (
    *("loss", "acc", "balanced_acc", "acc5", "dice", "iou", *SURFACES, "mae", "rmse", "r2"),
    *("auroc", "ap", "f1", "sensitivity", "specificity", "ece"),
)
LOWER_IS_BETTER = ("loss", *SURFACES, "mae", "rmse", "ece")


def higher_is_better(figure: str) -> bool:
    """Whether the largest value of a figure such as ``val/acc`` is the best."""
    # a figure of your own may end so, too: "val/dice_loss"
    return not figure.rpartition("/")[2].endswith(LOWER_IS_BETTER)
