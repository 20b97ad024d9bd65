import pytest
from small_weights import change, write_entry

from revzoo.weights.errors import EntryError, UnknownWeightsError
from revzoo.weights.table import WeightsTable


@pytest.fixture
def folder(tmp_path):
    for name in ("revnet38.small", "revnet38.other", "resnet32.small"):
        write_entry(tmp_path, name)
    return tmp_path


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("*", ["resnet32.small", "revnet38.other", "revnet38.small"]),
        ("revnet38", ["revnet38.other", "revnet38.small"]),
        ("*.small", ["resnet32.small", "revnet38.small"]),
        ("re[sv]net3?.o*", ["revnet38.other"]),
        ("vgg*", []),
    ],
)
def test_patterns_match_whole_names_or_architectures(folder, pattern, names):
    assert WeightsTable(folder).names(pattern) == names


def test_a_tag_names_its_entry_and_a_lone_entry_is_the_default(folder):
    table = WeightsTable(folder)
    assert table.find("revnet38.other").name == "revnet38.other"
    assert table.find("resnet32").name == "resnet32.small"


def test_of_several_entries_the_default_is_chosen(folder):
    with pytest.raises(UnknownWeightsError, match=r"revnet38\.other, revnet38\.small"):
        WeightsTable(folder).find("revnet38")
    change(folder, "revnet38.small", default=True)
    assert WeightsTable(folder).find("revnet38").name == "revnet38.small"
    change(folder, "revnet38.other", default=True)
    with pytest.raises(EntryError, match="two are the default"):
        WeightsTable(folder).find("revnet38")


def test_an_unknown_tag_is_refused_with_the_nearest(folder):
    with pytest.raises(UnknownWeightsError, match=r"did you mean 'revnet38\.small'"):
        WeightsTable(folder).find("revnet38.smal")


def test_a_name_without_weights_may_have_meant_a_file_or_folder():
    with pytest.raises(UnknownWeightsError, match="no weights, file or folder 'my_folder'"):
        WeightsTable().find("my_folder")


def test_names_need_no_reading_but_use_does(folder):
    (folder / "revnet110.bad.json").write_text("{")
    assert "revnet110.bad" in WeightsTable(folder).names()
    with pytest.raises(EntryError, match=r"revnet110\.bad\.json"):
        WeightsTable(folder).find("revnet38.small")


def test_a_file_must_be_named_as_its_entry(folder):
    (folder / "revnet38.small.json").rename(folder / "revnet38.x.json")
    with pytest.raises(EntryError, match="expected one file, named like its entry"):
        WeightsTable(folder).find("revnet38.x")


def test_two_folders_may_not_repeat_a_name(folder):
    with pytest.raises(EntryError, match="expected one file"):
        WeightsTable(folder, folder).find("revnet38.small")


def test_a_missing_folder_raises(tmp_path):
    with pytest.raises(EntryError, match="not a folder"):
        WeightsTable(tmp_path / "none").names()
