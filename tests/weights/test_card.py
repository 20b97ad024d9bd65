from omegaconf import OmegaConf
from small_weights import write_entry

from revzoo.weights.card import model_card
from revzoo.weights.entry import WeightsEntry


def header(card):
    opening, yaml, _ = card.split("---\n", 2)
    assert opening == ""
    return OmegaConf.to_container(OmegaConf.create(yaml))


def test_the_card_tells_what_the_entry_tells(tmp_path):
    entry = write_entry(tmp_path, measured_on='noise: "1" image', classes=tuple("abcde"))
    card = model_card(entry, source="hf-hub:me/net")
    facts = header(card)
    assert facts["license"] == "mit"
    assert (facts["library_name"], facts["pipeline_tag"]) == ("revzoo", "image-classification")
    (result,) = facts["model-index"][0]["results"]
    assert result["metrics"] == [{"type": "test/acc", "value": 0.5}]
    assert result["dataset"]["name"] == 'noise: "1" image'
    for text in (entry.sha256, entry.recipe, "a, b, c, d, e", "3 x 8 x 8", "0.5, 0.4, 0.3"):
        assert text in card
    assert 'revzoo.from_pretrained("hf-hub:me/net")' in card


def test_unknown_facts_are_left_out():
    entry = WeightsEntry(
        name="revnet38",
        architecture="revnet38",
        num_classes=2,
        input_size=(3, 8, 8),
        sha256="0" * 64,
        file="model.safetensors",
    )
    card = model_card(entry)
    assert header(card)["tags"] == ["image-classification", "revzoo"]
    assert "reversible" in header(model_card(entry, reversible=True))["tags"]
    assert {"license", "model-index"}.isdisjoint(header(card))
    assert "None" not in card
    assert "Trained with" not in card
