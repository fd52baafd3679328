"""Documents -> packed sequences: tokens, boundaries and the mask of targets.

Shapes: S sequences, L positions of a sequence, N tokens of one document.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from cache.records import Sequences
from kd.config.data import DataConfig
from kd.errors import DataError
from kd.text.stored.places import BEGINNING, TextPlace
from kd.text.teacher_side.sequences import TeacherPrompt, widen

#: Sequences that are packed at once. From a stream at most this many are read beyond those wanted,
#: and the short texts that were tokenized with the last of them.
BLOCK_SEQUENCES = 64
#: Marks padding while sequences are laid out; no tokenizer has this id.
_PAD = np.uint32(2**32 - 1)


@dataclass(frozen=True, eq=False)
class Document:
    """The tokens of one text or chat.

    ``ids`` (N,) uint32. ``trained`` (N,) bool: which tokens are targets; the others are context.
    None = all are targets. ``begins``: whether its first token begins a text; if not, it continues
    the document before it, which has a whole number of sequences. ``place``: that of its first
    token. ``prompt``: what the teacher reads before it, if that is another context.
    """

    ids: np.ndarray
    trained: np.ndarray | None = None
    begins: bool = True
    place: TextPlace = BEGINNING
    prompt: TeacherPrompt | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def split(self, place: int) -> tuple[Document, Document]:
        """Return the document up to token ``place``, and the rest of it."""

        def cut(part: slice, begin: TextPlace) -> Document:
            trained = None if self.trained is None else self.trained[part]
            return replace(self, ids=self.ids[part], trained=trained, place=begin)

        rest = cut(slice(place, None), self.place.advance(place))
        if self.prompt is not None:
            rest = replace(rest, prompt=self.prompt.advance(place, self.ids))
        return cut(slice(place), self.place), rest

    @property
    def end(self) -> TextPlace:
        """The place after its last token."""
        return self.place.advance(len(self))

    def list_prompts(self, length: int) -> list[TeacherPrompt]:
        """List what the teacher reads before each sequence of ``length`` tokens; it has a context.

        The document begins a sequence.
        """
        assert self.prompt is not None, "each document of a text with contexts has one"
        return [self.prompt.advance(at, self.ids) for at in range(0, len(self), length)]

    def as_teacher_reads(self) -> Document:
        """Return what the teacher reads: its prompt, and the document after the student's."""
        assert self.prompt is not None, "each document of a text with contexts has one"
        ids, first = self.prompt.ids, self.prompt.first
        targets = np.concatenate([np.zeros(len(ids), bool), self.targets[first:]])
        return Document(np.concatenate([ids, self.ids[first:]]), targets)

    @property
    def targets(self) -> np.ndarray:
        """True at each token that is a target, (N,) bool."""
        return np.ones(len(self), bool) if self.trained is None else self.trained


class Block(NamedTuple):
    """Some sequences of a text, and the place where the next one begins."""

    sequences: Sequences
    end: TextPlace


def pack_documents(documents: Iterable[Document], config: DataConfig, pad_id: int = 0) -> Sequences:
    """Lay documents end to end, cut them into (S, L), and pad the last sequence.

    A document that is cut continues in the next sequence as a piece of its own. A position has a
    target if the next token is in the same piece and is trained. Only sequences of chats without
    any target are dropped.
    """
    blocks = pack_in_blocks(documents, config, pad_id=pad_id)
    return Sequences.concatenate(block.sequences for block in blocks)


def pack_in_blocks(
    documents: Iterable[Document],
    config: DataConfig,
    field: str = "train",
    pad_id: int = 0,
    resumed: bool = False,
    teacher_length: int | None = None,
) -> Iterator[Block]:
    """Pack documents as ``pack_documents`` does, but read only what fills the next block.

    ``resumed``: sequences of this text were packed before, so that there may be no more. With
    ``teacher_length`` those of the teacher, of this length, stand beside them.
    """
    found = resumed
    for number, part in enumerate(_split_into_blocks(documents, config, resumed)):
        if number == 0 and not resumed:  # this block is full, or it is all the text there is
            tokens = sum(map(len, part))
            if tokens == 0:
                detail = f"data.{field} holds no text."
                raise DataError(detail, "Check the files and data.text_column.")
            if config.packing and tokens < config.sequence_length:
                raise refuse_short(field, tokens, config.sequence_length)
        sequences = _pack_block(part, config, pad_id)
        if teacher_length is not None:
            prompts = [each for one in part for each in one.list_prompts(config.sequence_length)]
            sequences = widen(sequences, prompts, teacher_length, pad_id)
        if any(each.trained is not None for each in part):
            # Sequences of chats without a target would cost a pass and teach nothing.
            sequences = sequences.select(sequences.target_mask.any(axis=1))
        found |= len(sequences) > 0
        if len(sequences):
            yield Block(sequences, part[-1].end)
    if not found:
        raise DataError(
            f"data.{field}: every token of the assistant is the first of its sequence, where "
            "nothing predicts it.",
            "Raise data.sequence_length.",
        )


def join_blocks(blocks: Iterable[Sequences]) -> Sequences:
    """Join ``blocks`` (at least one) as they come: 6 bytes a token, and one block beside them."""
    joined = list[np.ndarray]()
    count = 0
    for block in blocks:
        joined = joined or [np.empty((0, block.length), each.dtype) for each in block.arrays]
        end = count + len(block)
        if end > len(joined[0]):
            # A little room to spare, because to make room may copy all.
            _resize(joined, end + end // 16)
        for array, part in zip(joined, block.arrays, strict=True):
            array[count:end] = part
        count = end
    _resize(joined, count)
    return Sequences(*joined)


def _resize(arrays: list[np.ndarray], rows: int) -> None:
    """Change the number of rows of ``arrays`` in place."""
    for array in arrays:
        # No other array shares this memory, which numpy cannot know.
        array.resize((rows, array.shape[1]), refcheck=False)


def _split_into_blocks(
    documents: Iterable[Document], config: DataConfig, begun: bool
) -> Iterator[list[Document]]:
    """Group documents into blocks of at least ``BLOCK_SEQUENCES`` whole sequences.

    The last document of a block is cut so that no token is left over; the last block takes the
    rest. Without any text one empty block is yielded, unless the text has ``begun`` before.
    """
    enough = BLOCK_SEQUENCES * config.sequence_length
    held = list[Document]()
    tokens = 0
    for document in documents:
        held.append(document)
        tokens += len(document)
        if tokens >= enough:
            spare = tokens % config.sequence_length if config.packing else 0
            held[-1], rest = document.split(len(document) - spare)
            yield held
            held = [rest] if spare else []
            tokens = spare
            begun = True
    if held or not begun:
        yield held


def _pack_block(documents: list[Document], config: DataConfig, pad_id: int) -> Sequences:
    tokens = _lay_out([each.ids for each in documents], config, _PAD)
    # True at the first token of each text, and nowhere in what continues one.
    start = _lay_out([np.arange(len(each)) < each.begins for each in documents], config)
    real = tokens != _PAD
    target = np.zeros_like(start)
    start[:, 1:] |= real[:, :-1] & ~real[:, 1:]  # padding is a document of its own
    start[:, 0] = True
    target[:, :-1] = _lay_out([each.targets for each in documents], config)[:, 1:] & ~start[:, 1:]
    padded = np.where(real, tokens, np.uint32(pad_id))
    return Sequences(padded, document_start=start, target_mask=target)


def _lay_out(
    parts: list[np.ndarray], config: DataConfig, fill: np.uint32 | bool = False
) -> np.ndarray:
    """Lay ``parts`` end to end as (S, L); ``fill`` pads the last, or each without packing."""
    if not config.packing:
        parts = [_pad_to_multiple(part, config.sequence_length, fill) for part in parts]
    whole = _pad_to_multiple(np.concatenate(parts), config.sequence_length, fill)
    return whole.reshape(-1, config.sequence_length)


def _pad_to_multiple(array: np.ndarray, length: int, fill: np.uint32 | bool) -> np.ndarray:
    """Add ``fill`` to ``array`` up to a multiple of ``length``."""
    return np.concatenate([array, np.full(-len(array) % length, fill, array.dtype)])


def refuse_short(field: str, tokens: int, length: int) -> DataError:
    """Return the error for a text of fewer tokens than a sequence."""
    detail = f"data.{field} holds {tokens} tokens, fewer than one sequence of {length}."
    return DataError(detail, "Add text or lower data.sequence_length.")


def compute_position_ids(document_start: np.ndarray) -> np.ndarray:
    """Compute positions (S, L) that restart at every document; attention masks need them."""
    index = np.arange(document_start.shape[1])
    return index - np.maximum.accumulate(np.where(document_start, index, 0), axis=1)


def needs_isolation(positions: np.ndarray, target_mask: np.ndarray) -> np.ndarray:
    """Return for each row whether plain causal attention would see another document, (S,) bool.

    That is so if a target has another document before it in the row. ``positions`` (S, L) are those
    of ``compute_position_ids``. A last document without a target, such as padding, does not count.
    """
    return ((positions != np.arange(positions.shape[1])) & target_mask).any(axis=1)


def measure_text_lengths(sequences: Sequences) -> np.ndarray:
    """Count the tokens of each sequence up to its last predicted one, (S,)."""
    # A target at position t predicts the token at t + 1, so the text has t + 2 tokens.
    return np.max(np.where(sequences.target_mask, np.arange(2, sequences.length + 2), 0), axis=1)
