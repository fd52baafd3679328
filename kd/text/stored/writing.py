"""Write the sequences of a text into a token store, shard by shard.

A shard is one unit of work. A process that is killed loses at most the shard that it was filling;
the next one goes on after the last finished shard, and writes the bytes that the first one would
have written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from cache.disk import hash_file, locked, make_folder, remove_path, storage_errors, write_file
from cache.errors import StorageError
from kd.errors import DataError
from kd.files import format_bytes, measure_free_bytes, write_json
from kd.progress import SILENT, Monitor
from kd.text.mixtures import TextReader
from kd.text.packing import join_blocks
from kd.text.reading.notes import TextNotes
from kd.text.stored import shard_files
from kd.text.stored.inputs import Inputs, hash_young_files, require_inputs
from kd.text.stored.places import Cursor

#: Bytes of English text for a token.
_BYTES_PER_TOKEN = 4.0


@dataclass(frozen=True)
class StoreOrder:
    """A text to tokenize: at most ``wanted`` sequences of what ``read`` opens at a cursor.

    ``describe`` returns the inputs as they are now. ``source_bytes``: the bytes of the text, 0 if
    they are not known. ``notes`` holds what the reading finds.
    """

    layout: shard_files.Layout
    describe: Callable[[], Inputs]
    read: Callable[[Cursor | None], TextReader]
    wanted: int | None
    source_bytes: int
    notes: TextNotes = field(default_factory=TextNotes)


def write_store(folder: Path, order: StoreOrder, monitor: Monitor = SILENT) -> None:
    """Make the store in ``folder`` complete; wait while another process writes it.

    Raises ``DataError`` if the folder holds another text, or where the text changes meanwhile,
    and ``StorageError`` if the disk is too small.
    """
    lock = shard_files.locate_lock(folder)
    with storage_errors(folder):
        make_folder(folder.parent)
        with locked(lock, lambda: monitor.check("while another process read the text")):
            if (folder / shard_files.INPUTS).is_file() and _has_changed(folder):
                remove_path(folder)
            make_folder(folder)
            inputs = order.describe()
            if not (folder / shard_files.INPUTS).is_file():
                young = hash_young_files(inputs)
                content = {"format": shard_files.FORMAT, "inputs": inputs, "young": young}
                write_json(folder / shard_files.INPUTS, content)
            check_inputs(folder, inputs)
            if (folder / shard_files.MANIFEST).is_file():
                return
            done = shard_files.StoreProgress.read(folder)
            _require_space(folder, order, done)
            manifest = _write_shards(folder, order, done)
            _require_same(folder, order, inputs)
            # A complete store is not read again, so that it tells what was found in its text.
            notices = tuple(order.notes.list_notices())
            write_json(folder / shard_files.MANIFEST, replace(manifest, notices=notices).to_json())
            remove_path(folder / shard_files.PROGRESS)


def is_current(folder: Path, expected: Inputs) -> bool:
    """Return whether the store in ``folder`` is complete; raise if it is not of ``expected``."""
    if not (folder / shard_files.MANIFEST).is_file():
        return False
    check_inputs(folder, expected)
    return not _has_changed(folder)


def _has_changed(folder: Path) -> bool:
    """Return whether a file that was young when the store was begun has another content now."""
    young = shard_files.read_object(folder, folder / shard_files.INPUTS).get("young", {})
    return any(not Path(file).is_file() or hash_file(Path(file)) != young[file] for file in young)


def check_inputs(folder: Path, expected: Inputs) -> None:
    """Raise ``DataError`` if the store was made of other inputs, or by another version."""
    found = shard_files.read_object(folder, folder / shard_files.INPUTS)
    shard_files.require_format(folder, found)
    require_inputs(folder, found.get("inputs"), expected)


def _write_shards(
    folder: Path, order: StoreOrder, found: shard_files.StoreProgress | None
) -> shard_files.TextManifest:
    """Write the shards that are missing; return the manifest of all."""
    reader = order.read(None if found is None else found.cursor)
    done = found or shard_files.StoreProgress(0, 0, 0, "", reader.cursor)
    order.notes.recall(done.notes)
    size = order.layout.shard_sequences
    while True:
        most = size if order.wanted is None else min(size, order.wanted - done.sequences)
        parts = list(reader.read_all(most))
        if not parts:
            break
        sequences = join_blocks(parts)
        path = shard_files.locate_shard(folder, done.shards)
        data = order.layout.encode(sequences)
        seal = shard_files.TokenSeal.of(data, sequences)
        make_folder(path.parent)
        write_file(path, data)
        write_json(shard_files.locate_seal(folder, done.shards), asdict(seal))
        # A shard counts from here on. One that is killed before is written again.
        done = done.add(seal, reader.cursor, order.notes.to_json())
        write_json(folder / shard_files.PROGRESS, done.to_json())
    counts = (done.sequences, done.targets, done.sha256)
    return shard_files.TextManifest(order.layout, *counts, reader.ended)


def _require_same(folder: Path, order: StoreOrder, inputs: Inputs) -> None:
    """Raise ``DataError`` if the text has changed since its reading began; what is read goes."""
    if order.describe() == inputs and not _has_changed(folder):
        return
    # Nothing shows which of the shards hold the text as it was.
    remove_path(folder)
    raise DataError(
        "The text changed while it was read: expected the sizes and times of its files to stay.",
        "Run again when no other program writes to the files of data.train and data.validation.",
    )


def _require_space(folder: Path, order: StoreOrder, done: shard_files.StoreProgress | None) -> None:
    """Raise ``StorageError`` if the disk cannot hold the tokens that are to come."""
    layout = order.layout
    limits = [order.source_bytes / _BYTES_PER_TOKEN] if order.source_bytes else []
    limits += [order.wanted * layout.sequence_length] if order.wanted is not None else []
    stored = 0 if done is None else done.sequences * layout.sequence_length
    need = (min(limits, default=0) - stored) * layout.bytes_per_token
    free = measure_free_bytes(folder)
    if need > free:
        raise StorageError(
            f"{folder}: the tokens of the text take about {format_bytes(need)} more, but only "
            f"{format_bytes(free)} are free.",
            "Free space, set KD_HOME to a larger disk, or set data.max_train_samples.",
        )
