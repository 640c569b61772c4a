"""docs/formats.md has every key that is written, with its type, and no other key."""

import csv
import dataclasses
import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers import assert_same_arrays, mesh_of

from alibi_jax.checkpoints import FORMAT, Checkpoints
from alibi_jax.checkpoints.migrations import dotted_name
from alibi_jax.config import POSITIONS, Config
from alibi_jax.data import token_streams
from alibi_jax.data.tokenizers import BpeTokenizer, ByteTokenizer
from alibi_jax.data.word_tokenizer import WordTokenizer
from alibi_jax.evaluation import EvaluationOptions, RunEvaluation, evaluate, gains, load_run
from alibi_jax.evaluation.command import VERSION
from alibi_jax.model import abstract_model
from alibi_jax.report.tidy import COLUMNS
from alibi_jax.training import throughput
from alibi_jax.training.loop import train

pytestmark = pytest.mark.usefixtures("quick_compile")

PAGE = (Path(__file__).parents[1] / "docs" / "formats.md").read_text()
TYPES = {
    "int": int,
    "float": float,
    "str": str,
    "bool": bool,
    "null": type(None),
    "list": list,
    "object": dict,
}
# Objects whose keys are those of a configuration, of packages, of a tokenizer or of arrays.
OPAQUE = {"config", "versions", "tokenizer", "arrays"}


def table_rows(first_column):
    """The rows of the tables whose first column has this name, with the headings above them.

    A row is (name in the level-2 heading, name in the level-3 heading, cells).
    """
    file = prefix = ""
    in_table = False
    for line in PAGE.splitlines():
        if heading := re.match(r"(##+) (.*)", line):
            name = next(iter(re.findall("`([^`]+)`", heading[2])), "")
            file, prefix = (name, "") if heading[1] == "##" else (file, name)
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            in_table = False
        elif in_table and not line.startswith("|---"):
            yield file, prefix, cells
        elif not in_table:
            in_table = cells[0] == first_column


def keys_of(file):
    """{dotted key: names of its types} of a file, with the keys of the objects that files share."""
    keys = {}
    for found, prefix, (key, types, *_) in table_rows("key"):
        if found != file:
            continue
        path = ".".join(filter(None, [prefix, key.strip("`")]))
        assert path not in keys
        if types in ("interval", "provenance"):
            keys |= {f"{path}.{inner}": names for inner, names in keys_of(types).items()}
            types = "object"
        keys[path] = types.split(" or ")
    assert keys
    return keys


def written(value, path=""):
    """(dotted key, value) of all that a JSON value holds; keys that are lengths are LENGTH."""
    if isinstance(value, list):
        for child in value:
            yield from written(child, f"{path}[]")
    elif isinstance(value, dict):
        for key, child in value.items():
            name = ".".join(filter(None, [path, "LENGTH" if key.isdecimal() else key]))
            if not name.endswith("LENGTH"):
                yield name, child
            if key not in OPAQUE:
                yield from written(child, name)


def check_keys(page, values):
    """Every key and type in these JSON values is on the page, and no key on it is unknown."""
    found = [pair for value in values for pair in written(value)]
    assert {name for name, _ in found} == page.keys()
    for name, value in found:
        assert type(value) in {TYPES[kind] for kind in page[name]}, (name, value)


@pytest.fixture(scope="module")
def workdir(tmp_path_factory, tiny_config):
    """A run with its evaluation in eval/, which has each part of the results and each error."""
    folder = tmp_path_factory.mktemp("formats")
    text = folder / "text.txt"
    text.write_text("".join(f"line {i} says that {i * i % 97} is next\n" for i in range(400)))
    values = {"data.dataset": "text", "data.path": str(text), "data.data_dir": str(folder / "data")}
    values |= {
        "train.max_skipped_steps": 1,
        "train.steps": 4,
        "train.validation_every": 2,
        "train.validation_targets": 64,
    }
    losses = RunEvaluation.losses

    def refuse_rescaled(self, targets, context):
        if str(self.rescaling) != "none":
            raise ValueError("not with a rescaling")
        return losses(self, targets, context)

    with pytest.MonkeyPatch.context() as patch:
        # A CPU has no known peak.
        patch.setattr(throughput, "peak_flops", lambda kind: 1e12)
        train(tiny_config(values), folder / "runs" / "alibi")
        # All targets are key targets: so small a model finds none.
        patch.setattr(gains, "ALPHA", -1e9)
        patch.setattr(gains, "BETA", -1e9)
        patch.setattr(RunEvaluation, "losses", refuse_rescaled)
        options = EvaluationOptions(
            lengths="1x,2x,1000x",
            protocols="nonoverlapping,sliding:4,fixed",
            rescalings="none,linear",
            attention="1x,1000x",
            targets=20,
            passage=8,
            batch_tokens=512,
        )
        assert evaluate([str(folder / "runs" / "alibi")], options) == 1
    return folder / "runs" / "alibi"


@pytest.fixture(scope="module")
def metadata(workdir):
    with Checkpoints(workdir) as checkpoints:
        return dataclasses.asdict(checkpoints.metadata(4))


@pytest.fixture(scope="module")
def results(workdir):
    return json.loads((workdir / "eval" / "results.json").read_text())


def test_the_metrics(workdir):
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    check_keys(keys_of("metrics.jsonl"), lines)
    assert set(throughput.THROUGHPUT_METRICS) <= lines[0].keys()


def test_the_metadata_of_a_checkpoint(workdir, metadata):
    stored = json.loads((workdir / "checkpoints" / "4" / "_CHECKPOINT_METADATA").read_text())
    stored = stored["custom_metadata"]
    check_keys(keys_of("metadata"), [stored])
    assert stored == metadata | {"digest": stored["digest"]}
    for arrays in stored["arrays"].values():
        for array in arrays.values():
            assert array.keys() == {"shape", "checksum"}
            assert len(array["checksum"]) == 16
    assert f"now {FORMAT}" in PAGE
    for _, _, (key, _, _, meaning) in table_rows("key"):
        if key == "`config`" and "sections" in meaning:
            assert set(metadata["config"]) <= set(re.findall("`([a-z]+)`", meaning))
        if key == "`versions`":
            packages = set(re.findall("`([a-z-]+)`", meaning))
    assert packages == metadata["provenance"]["versions"].keys()


def test_every_path_of_a_workdir(workdir):
    paths = {cells[0].strip("`") for _, _, cells in table_rows("path")}
    for path in workdir.iterdir():
        assert {f"{path.name}/", path.name, f"{path.name}/STEP/"} & paths
    data = workdir.parents[1] / "data"
    assert all(any(f"`{path.name}/" in name for name in PAGE.split(" ")) for path in data.iterdir())


def test_a_tokenizer():
    tokenizers = [
        ByteTokenizer(),
        BpeTokenizer.train(iter([b"one two"]), 258),
        WordTokenizer.train(iter([b" one \n"])),
    ]
    check_keys(keys_of("tokenizer"), [tokenizer.to_dict() for tokenizer in tokenizers])


def test_a_token_stream(workdir):
    folders = [path.parent for path in workdir.parents[1].glob("data/alibi_jax/*/meta.json")]
    assert folders
    for folder in folders:
        meta = json.loads((folder / "meta.json").read_text())
        check_keys(keys_of("meta.json"), [meta])
        assert f"layout of the stream, now {token_streams._FORMAT} " in PAGE
        tokens = np.memmap(folder / "tokens.bin", mode="r", dtype=meta["dtype"])
        starts = np.memmap(folder / "starts.bin", mode="r", dtype=np.int64)
        assert (len(tokens), len(starts)) == (meta["tokens"], meta["starts"])
        assert {path.name for path in folder.iterdir()} == {"tokens.bin", "starts.bin", "meta.json"}


def test_the_results(results):
    page = keys_of("results.json") | keys_of("provenance")
    # A judge that finds no key target.
    none_found = gains.long_ppl(np.zeros(1, np.float32), np.array([False]), "judge")
    judged = {"runs": [{"gain": {"long_ppl": none_found}}]}
    # As JSON, for which a NumPy number would not do.
    values = [results, json.loads(json.dumps(judged))]
    check_keys(page, values)
    assert f"version of this format, now {VERSION};" in PAGE


def test_the_columns_and_quantities_of_the_csv(workdir):
    columns = [
        name for _, _, cells in table_rows("column") for name in re.findall("`(.*?)`", cells[0])
    ]
    assert columns == list(COLUMNS)
    quantities = {cells[0].strip("`"): cells[1] for _, _, cells in table_rows("quantity")}
    with (workdir / "eval" / "results.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["quantity"]]
    found = {(re.sub(r"_[\d.]+$", "_SHARE", row["quantity"]), row["unit"]) for row in rows}
    assert found == set(quantities.items())


def test_the_parameters_are_read_without_the_package(workdir, metadata, monkeypatch):
    (block,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert "alibi_jax" not in block
    monkeypatch.chdir(workdir.parents[1])
    names = {}
    exec(block.replace("/600", "/4"), names)
    assert names["config"] == metadata["config"]
    params = load_run(workdir, 4).params
    # On disk every key is a string.
    flat = {dotted_name(path): leaf for path, leaf in jax.tree.leaves_with_path(params)}
    read = {dotted_name(path): leaf for path, leaf in jax.tree.leaves_with_path(names["params"])}
    assert_same_arrays(dict(sorted(read.items())), dict(sorted(flat.items())))


SIZES = {"D": 24, "N": 4, "K": 2, "H": 6, "F": 40, "T": 20}
VOCAB = 130
MODELS = [
    *({"position": position} for position in POSITIONS),
    {"position": "t5,none,kerple_log", "num_layers": 5},
    {"activation": "swiglu", "use_bias": True, "tied_embeddings": False},
    {"norm": "rmsnorm", "final_norm": False},
    {"norm": "rmsnorm", "adaptive_cutoffs": "20,129", "adaptive_factor": 2},
]


def test_the_parameters_and_their_shapes():
    page = {cells[0].strip("`"): cells[1] for _, _, cells in table_rows("parameter")}
    seen = set()
    for changes in MODELS:
        config = Config()
        config.train.length = SIZES["T"]
        config.model = dataclasses.replace(
            config.model, width=24, num_heads=4, num_kv_heads=2, ff_width=40
        )
        config.model = dataclasses.replace(config.model, **changes)
        _, params = abstract_model(config, VOCAB, mesh_of(1, 1, 1, 1))
        for path, leaf in jax.tree.leaves_with_path(params):
            name = dotted_name(path)
            assert leaf.dtype == np.float32
            numbers = {name: int(number) for name, number in _numbers(name)}
            generic = re.sub(r"(stacks)\.\d+", r"\1.S", name)
            generic = re.sub(r"(tables|projections)\.\d+", r"\1.B", generic)
            sizes = SIZES | _sizes(config.model, **numbers)
            shapes = [
                tuple(sizes[size] if size in sizes else int(size) for size in shape.split(", "))
                for shape in page[generic].split(" or ")
            ]
            assert leaf.shape in shapes, (name, leaf.shape)
            seen.add(generic)
    assert seen == page.keys()


def _numbers(name):
    """("S" or "B", number) of the stack or the band in a parameter's name."""
    yield from (("S", n) for n in re.findall(r"stacks\.(\d+)", name))
    yield from (("B", n) for n in re.findall(r"(?:tables|projections)\.(\d+)", name))


def _sizes(model, S=0, B=0):
    """The sizes n, R and E of a stack S or a band B, as the page defines them."""
    period = len(model.positions)
    tokens = VOCAB
    if model.cutoffs:
        ends = (0, *model.cutoffs, VOCAB)
        tokens = ends[B + 1] - ends[B] + (len(model.cutoffs) if B == 0 else 0)
    return {
        "n": -(-(model.num_layers - S) // period),
        "R": -(-tokens // 128) * 128,
        "E": model.width // model.adaptive_factor**B,
    }
