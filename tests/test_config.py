import dataclasses
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alibi_jax import config as configs
from alibi_jax.config import (
    Config,
    ConfigError,
    Mesh,
    Model,
    check_key,
    flatten,
    from_dict,
    nearest,
    parse_mesh,
)
from alibi_jax.data.builders import _FROM_PATH
from alibi_jax.data.tokenizers import _KINDS
from alibi_jax.model.layer import NORMS
from alibi_jax.positions import METHODS

SECTIONS = [field.name for field in dataclasses.fields(Config)]
KEYS = list(flatten(Config()))


def changed(**values):
    """The default configuration with `section__name=value`."""
    config = Config()
    for key, value in values.items():
        section, name = key.split("__")
        setattr(getattr(config, section), name, value)
    return config


def error_of(call):
    """The message of the ConfigError that a call raises, or None."""
    try:
        call()
    except ConfigError as error:
        return str(error)
    return None


def refusal(config):
    """What `check` says of a configuration that it refuses, in one line."""
    message = error_of(config.check)
    assert message is not None
    assert "\n" not in message
    return message


def test_every_norm_can_be_made():
    assert NORMS.keys() == set(configs.NORMS)


def test_every_rescaling_of_a_method_can_be_chosen():
    named = {name for choice in configs.POSITIONS.values() for name in choice.rescalings}
    assert set(configs.RESCALINGS) == named | {"none"}


def test_the_defaults_are_accepted():
    Config().check()


@pytest.mark.parametrize("position", configs.POSITIONS)
@pytest.mark.parametrize("activation", configs.ACTIVATIONS)
def test_every_choice_is_accepted(position, activation):
    changed(model__position=position, model__activation=activation).check()


@pytest.mark.parametrize("position", ["rotary,none", "alibi, t5", "fox,fire,none", "none,none"])
def test_patterns_of_positions_are_accepted(position):
    config = changed(model__position=position)
    config.check()
    assert config.model.positions == tuple(position.replace(" ", "").split(","))


@pytest.mark.parametrize(
    ("rescaling", "position"),
    [(name, position) for name, applies in configs.RESCALINGS.items() for position in applies],
)
def test_rescalings_are_accepted_where_they_apply(rescaling, position):
    factor = 1 if rescaling == "none" else 8
    changed(
        model__position=position, model__rescaling=rescaling, model__rescaling_factor=factor
    ).check()


def test_the_positions_that_can_be_chosen_are_those_that_exist():
    assert set(configs.POSITIONS) == set(METHODS)


def test_the_data_that_can_be_chosen_is_what_exists():
    assert set(configs.TOKENIZERS) == set(_KINDS)
    assert set(configs.FROM_PATH) == set(_FROM_PATH)
    for dataset in configs.FROM_PATH:
        for tokenizer in configs.TOKENIZERS:
            changed(data__dataset=dataset, data__path="x", data__tokenizer=tokenizer).check()


def test_flatten_names_every_value_as_a_command_line_would():
    assert {key.partition(".")[0] for key in KEYS} == set(SECTIONS)
    assert flatten(changed(model__width=192))["model.width"] == 192
    for key in KEYS:
        check_key(key)


@pytest.mark.parametrize("through", [lambda x: x, lambda x: json.loads(json.dumps(x))])
def test_a_configuration_survives_a_round_trip(through):
    config = changed(model__num_kv_heads=4, model__dropout=0.25, data__path="ü", mesh__fsdp=2)
    again = from_dict(through(dataclasses.asdict(config)))
    assert again == config
    assert flatten(again) == flatten(config)
    assert from_dict(through(dataclasses.asdict(Config()))) == Config()


def test_sections_are_not_shared():
    Config().model.width = 7
    assert Config().model.width == 128


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Model(positon="alibi"), "model.positon: no such key; did you mean 'position'?"),
        (lambda: Config(modle=Model()), "config.modle: no such key; did you mean 'model'?"),
        (lambda: setattr(Config().train, "step", 3), "train.step: .*'steps'"),
        (lambda: setattr(Config(), "optimiser", 3), "config.optimiser: .*'optimizer'"),
        (lambda: from_dict({"modle": {}}), "config.modle: .*'model'"),
        (lambda: from_dict({"model": {"num_head": 8}}), "model.num_head: .*'num_heads'"),
        (lambda: check_key("model.positon"), "model.positon: .*'position'"),
        (lambda: check_key("modle.position"), "config.modle: .*'model'"),
        (lambda: check_key("model"), "model is a whole section: .*position, .*num_layers"),
        (lambda: check_key("model.position.x"), "model.position.x: no such key"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_name_like_no_other_gets_the_whole_list():
    assert nearest("zzz", ["one", "two"]) == "known: one, two"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model.num_heads", "8"),
        ("model.num_heads", 8.0),
        ("model.num_heads", True),
        ("model.num_heads", None),
        ("model.num_kv_heads", 2.0),
        ("model.num_kv_heads", False),
        ("model.position", None),
        ("model.position", 3),
        ("model.remat", 1),
        ("model.dropout", "0.1"),
        ("model.dropout", True),
        ("train.steps", 1e3),
        ("data.path", b"x"),
    ],
)
def test_a_wrong_type_is_refused(key, value):
    section, name = key.split(".")
    with pytest.raises(ConfigError) as caught:
        setattr(getattr(Config(), section), name, value)
    assert f"{key}={value!r}" in str(caught.value)
    assert "give a value of type" in str(caught.value)


def test_right_types_are_taken():
    config = changed(model__dropout=0, model__num_kv_heads=None, optimizer__clip_norm=1)
    config.model.num_kv_heads = 2
    config.check()
    assert isinstance(config.optimizer.clip_norm, float)


def test_a_section_of_another_kind_is_refused():
    with pytest.raises(ConfigError, match=r"config\.data"):
        Config().data = Model()


BOUNDS = {
    f"{section.name}.{field.name}": field.metadata["bounds"]
    for section in dataclasses.fields(Config)
    for field in dataclasses.fields(section.type)
    if "bounds" in field.metadata
}


@pytest.mark.parametrize("key", BOUNDS)
def test_values_below_the_least_are_refused(key):
    section, name = key.split(".")
    bounds = BOUNDS[key]
    least = bounds["above"] if bounds["least"] is None else bounds["least"]
    message = refusal(changed(**{f"{section}__{name}": least - 1}))
    assert f"{key}={least - 1}" in message
    assert str(least) in message


@pytest.mark.parametrize("key", [key for key, bounds in BOUNDS.items() if bounds["most"]])
def test_values_above_the_most_are_refused(key):
    section, name = key.split(".")
    most = BOUNDS[key]["most"]
    message = refusal(changed(**{f"{section}__{name}": most + 1}))
    assert f"{key}={most + 1}" in message
    assert f"at most {most}" in message


FLOATS = [key for key in KEYS if isinstance(flatten(Config())[key], float)]


@pytest.mark.parametrize("value", [math.nan, -1.0, -math.inf, math.inf])
@pytest.mark.parametrize("key", FLOATS)
def test_negative_and_not_finite_are_refused(key, value):
    assert key in refusal(changed(**{key.replace(".", "__"): value}))


def test_a_mesh_on_the_command_line():
    assert parse_mesh("") == Mesh()
    assert parse_mesh("fsdp=4, context=2,data=-1") == Mesh(fsdp=4, context=2)
    for text in ("fsdp", "fsdp=0", "fsdp=-2", "rows=2", "fsdp=two", "fsdp=2;tensor=2"):
        with pytest.raises(ConfigError, match=f"--mesh={text}: .* is not AXIS=DEVICES; axes are"):
            parse_mesh(text)


def test_every_whole_number_has_a_most_value():
    whole = {key for key, value in flatten(Config()).items() if type(value) is int}
    whole |= {"model.num_kv_heads", "model.ff_width"}
    assert whole == {key for key in whole if BOUNDS[key]["most"] is not None}
    for key in whole:
        for value in (BOUNDS[key]["most"] + 1, 2**31, 2**63, 2**64, 10**400):
            if value > BOUNDS[key]["most"]:
                message = refusal(changed(**{key.replace(".", "__"): value}))
                assert message.startswith(f"{key}={value} must be a finite number, at least ")


def test_the_greatest_values_are_checked_at_once():
    """Each key alone, at its greatest value: accepted, or refused by another check in one line."""
    for key, bounds in BOUNDS.items():
        if bounds["most"] is not None:
            values = {key.replace(".", "__"): bounds["most"]}
            if error := error_of(changed(**values).check):
                assert key in error
                assert "\n" not in error


def test_every_number_has_a_least_value():
    numbers = {
        key
        for key, value in flatten(Config()).items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    assert numbers <= set(BOUNDS)


@pytest.mark.parametrize("key", [key for key, bounds in BOUNDS.items() if bounds["below"] == 1])
def test_shares_stay_below_one(key):
    assert f"{key}=1.0" in refusal(changed(**{key.replace(".", "__"): 1.0}))
    # Without cutoffs an adaptive softmax's dropout is refused.
    changed(model__adaptive_cutoffs="40", **{key.replace(".", "__"): 0.999}).check()


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"model__num_heads": 7}, ("model.num_heads=7", "model.width=128", "1, 2, 4, 8")),
        (
            {"model__num_heads": 8, "model__num_kv_heads": 3},
            ("model.num_kv_heads=3", "model.num_heads=8", "1, 2, 4, 8"),
        ),
        ({"model__position": "rotary", "model__num_heads": 128}, ("rotary", "even")),
        (
            {"model__position": "sinusoidal", "model__width": 9, "model__num_heads": 3},
            ("sinusoidal", "even", "9"),
        ),
        (
            {"model__position": "transformer_xl", "model__width": 9, "model__num_heads": 3},
            ("even",),
        ),
        ({"model__position": "xpos", "model__num_heads": 128}, ("xpos", "even")),
        (
            {"model__position": "rotary,nune"},
            ("model.position='rotary,nune'", "'nune'", "did you mean 'none'?"),
        ),
        ({"model__position": "rotary,,none"}, ("model.position='rotary,,none'", "''")),
        (
            {"model__position": "alibi,learned"},
            ("model.position='alibi,learned'", "'learned'", "alone"),
        ),
        (
            {"model__position": "rotary,none,none,none"},
            ("model.position='rotary,none,none,none'", "model.num_layers=3"),
        ),
        (
            {"model__position": "randomized", "model__randomized_range": 100},
            ("model.randomized_range=100", "train.length=128"),
        ),
        (
            {"model__position": "alibi", "model__rescaling": "yarn"},
            ("model.rescaling='yarn'", "rotary", "model.position='alibi'"),
        ),
        (
            {
                "model__position": "rotary",
                "model__rescaling": "ntk",
                "model__num_heads": 64,
            },
            ("model.rescaling='ntk'", "4", "2"),
        ),
        ({"model__rescaling_factor": 0.5}, ("model.rescaling_factor=0.5", "1")),
        ({"model__rescaling_factor": 4}, ("model.rescaling_factor=4", "model.rescaling='none'")),
        (
            {"model__position": "rotary_truncated", "model__rotary_fraction": 0.1},
            ("model.rotary_fraction=0.1", "8 pairs", "0.125"),
        ),
        ({"model__max_shift": 1 << 31}, ("model.max_shift=2147483648", "1073741824")),
        ({"model__randomized_range": 1 << 31}, ("model.randomized_range=2147483648",)),
        ({"model__rotary_fraction": 0.0}, ("model.rotary_fraction=0.0", "above 0")),
        ({"model__rotary_fraction": 1.5}, ("model.rotary_fraction=1.5", "at most 1")),
        (
            {"train__accumulation": 5},
            ("train.accumulation=5", "train.batch_size=32", "1, 2, 4, 8, 16, 32"),
        ),
        (
            {"model__width": 2**31 - 1},
            ("model.num_heads=8", "model.width=2147483647", "one of 1, 2147483647"),
        ),
        (
            {"train__batch_size": 2**31 - 1, "train__accumulation": 2},
            ("train.accumulation=2", "train.batch_size=2147483647", "one of 1, 2147483647"),
        ),
        (
            # This number has 1536 divisors; the twelve nearest to 1000 are named.
            {"model__width": 1396755360, "model__num_heads": 1000},
            ("one of 945, 952, 969, 988, 990, 1001, 1008, 1020, 1026, 1040, 1045, 1056",),
        ),
        (
            {"model__width": 2**31 - 1, "model__num_heads": 1},
            ("model.width=2147483647", "feed-forward width of 8589934588", "lower"),
        ),
        (
            {"train__batch_size": 2**24, "train__length": 128},
            ("train.batch_size=16777216", "train.length=128", "2147483648 tokens"),
        ),
        (
            {"model__adaptive_cutoffs": "9" * 5000},
            ("model.adaptive_cutoffs='999", "give rising token numbers"),
        ),
        ({"model__adaptive_cutoffs": "40,2147483648"}, ("give rising token numbers",)),
        ({"model__adaptive_cutoffs": "4\u00b2"}, ("give rising token numbers",)),
        ({"data__path": "x"}, ("data.dataset='sotu'", "data.path='x'")),
        ({"data__dataset": "text"}, ("data.dataset='text'", "data.path=''")),
        ({"data__dataset": "wikitext"}, ("data.dataset='wikitext'", "data.path=''")),
        ({"data__vocab_size": 256}, ("data.vocab_size=256", "257")),
        ({"optimizer__final_fraction": 1.5}, ("optimizer.final_fraction=1.5", "1")),
        ({"mesh__data": 0}, ("mesh.data=0", "-1")),
        ({"mesh__fsdp": -2}, ("mesh.fsdp=-2", "-1")),
    ],
)
def test_values_that_do_not_fit_each_other_are_refused(values, parts):
    message = refusal(changed(**values))
    for part in parts:
        assert part in message


CHOICES = {
    f"{section.name}.{field.name}": field.metadata["choices"]
    for section in dataclasses.fields(Config)
    for field in dataclasses.fields(section.type)
    if "choices" in field.metadata
}


@pytest.mark.parametrize("key", CHOICES)
def test_a_choice_that_does_not_exist_is_refused_with_the_nearest(key):
    choices = CHOICES[key]
    section, name = key.split(".")
    # A letter is doubled.
    typo = choices[0] + choices[0][-1]
    message = refusal(changed(**{f"{section}__{name}": typo}))
    assert f"{key}={typo!r}" in message
    assert f"did you mean {choices[0]!r}?" in message


@settings(max_examples=100, deadline=None)
@given(
    key=st.sampled_from(KEYS),
    value=st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-3, 300),
        st.floats(),
        st.sampled_from(["", "alibi", "rotary", "gelu", "text"]),
    ),
)
def test_any_value_is_refused_or_survives(key, value):
    section, name = key.split(".")
    config = Config()
    if refused := error_of(lambda: setattr(getattr(config, section), name, value)):
        assert f"{key}={value!r}" in refused
        assert config == Config()
    elif refused := error_of(config.check):
        assert key in refused
        assert "\n" not in refused
    else:
        assert flatten(config)[key] == value
        assert from_dict(json.loads(json.dumps(dataclasses.asdict(config)))) == config


@settings(max_examples=50, deadline=None)
@given(width=st.integers(1, 96), heads=st.integers(1, 96), kv_heads=st.integers(1, 96))
def test_what_is_accepted_divides(width, heads, kv_heads):
    config = changed(model__width=width, model__num_heads=heads, model__num_kv_heads=kv_heads)
    if width % heads == 0 and heads % kv_heads == 0:
        config.check()
    else:
        refusal(config)
