import pytest

from alibi_jax.config import Config, ConfigError, Model, Train
from alibi_jax.evaluation.rescaling import NAMES, Rescaling, parse_rescalings


def config(position="rotary", length=128):
    return Config(model=Model(position=position), train=Train(length=length))


def test_rescalings_are_parsed():
    parsed = parse_rescalings("none, linear,yarn:8,dynamic_ntk:2.5")
    assert parsed == [
        Rescaling("none"),
        Rescaling("linear"),
        Rescaling("yarn", 8.0),
        Rescaling("dynamic_ntk", 2.5),
    ]
    assert parse_rescalings("linear,none,linear") == parsed[1::-1]
    assert [str(rescaling) for rescaling in parsed] == [
        "none",
        "linear",
        "yarn:8",
        "dynamic_ntk:2.5",
    ]


@pytest.mark.parametrize(
    "text",
    ["", "linar", "linear:", "linear:x", "linear:0.5", "yarn:nan", "ntk:inf", "none:2", "a:2"],
)
def test_an_invalid_rescaling_is_refused(text):
    with pytest.raises(ValueError, match=r"--rescalings=.*none, linear, ntk, yarn, dynamic_ntk"):
        parse_rescalings(f"ntk,{text}")


@pytest.mark.parametrize("name", ["linear", "ntk", "yarn"])
def test_the_factor_is_the_length_over_the_training_length_or_the_one_given(name):
    model = Rescaling(name).at(config(), 1024).model
    assert (model.rescaling, model.rescaling_factor) == (name, 8.0)
    assert Rescaling(name).at(config(), 64).model.rescaling_factor == 1.0
    for length in (64, 1024):
        assert Rescaling(name, 4.0).at(config(), length).model.rescaling_factor == 4.0


def test_e4_dynamic_ntk_is_ntk_by_a_factor_that_follows_the_length():
    """huggingface/transformers#24653: factor 2, from 2048 to 4096 tokens."""
    model = Rescaling("dynamic_ntk", 2.0).at(config(length=2048), 4096).model
    assert (model.rescaling, model.rescaling_factor) == ("ntk", 3.0)
    assert Rescaling("dynamic_ntk", 2.0).at(config(length=2048), 2048).model.rescaling_factor == 1
    assert Rescaling("dynamic_ntk").at(config(), 1024).model.rescaling_factor == 8.0


def test_a_model_trained_with_rescaled_positions_is_not_rescaled_again():
    trained = config()
    trained.model.rescaling, trained.model.rescaling_factor = "linear", 4.0
    assert Rescaling("none").at(trained, 1024) is trained
    assert Rescaling("none").factor_at(trained, 1024) == 4.0
    with pytest.raises(ConfigError, match=r"linear:8: .* trained with .*'linear' already.*none"):
        Rescaling("linear", 8.0).at(trained, 1024)


def test_the_rest_of_the_configuration_stays():
    given = config()
    rescaled = Rescaling("yarn", 8.0).at(given, 1024)
    rescaled.model.rescaling, rescaled.model.rescaling_factor = "none", 1.0
    assert rescaled == given == config()
    assert Rescaling("none").at(given, 1024) is given


@pytest.mark.parametrize(
    ("position", "names"),
    [
        ("rotary", {"none", "linear", "ntk", "yarn", "dynamic_ntk"}),
        ("none,rotary", {"none", "linear", "ntk", "yarn", "dynamic_ntk"}),
        ("alibi", {"none", "linear"}),
        ("alibi_learned", {"none", "linear"}),
        ("t5", {"none"}),
        ("xpos", {"none"}),
    ],
)
def test_a_rescaling_is_for_the_methods_that_have_it(position, names):
    applied = {name for name in NAMES if Rescaling(name).applies_to(config(position))}
    assert applied == names
    for name in set(NAMES) - names:
        with pytest.raises(ConfigError, match=rf"not for model.position='{position}'"):
            Rescaling(name, 2.0).at(config(position), 256)
