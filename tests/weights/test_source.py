from __future__ import annotations

import pytest

from revzoo.weights.errors import UnknownWeightsError
from revzoo.weights.source import resolve_source


@pytest.mark.parametrize("missing", ["outputs/nothing", "nothing.ckpt"])
def test_a_missing_path_says_all_that_is_expected(missing: str) -> None:
    """The message named files only, but a run's folder and a name of weights are valid, too."""
    message = f"no checkpoint {missing}: expected a file, the folder of a run or of weights, or a n"
    with pytest.raises(UnknownWeightsError, match=message):
        resolve_source(missing)
