"""A chat -> the texts that its template makes of it, and what of them is learned.

An answer is learned as it is rendered when it is the last message: after the prompt with which a
model is asked for it, and with the end of its turn. Many templates render earlier answers in
another way, for example without their reasoning. So a chat has one text, and a further one for each
answer that the text of a later one does not hold as it is learned.

The template's {% generation %} markers show which characters the assistant wrote; without markers,
they are what an answer adds to its prompt.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from kd.errors import DataError
from kd.progress import Notice
from kd.text.chat.chat import Chat, list_forms
from kd.text.chat.checks import drop_reasoning, find_lost, holds, is_open, read_content, shorten
from kd.text.chat.rendering import Span, marks_answers, render

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: The remedy for every chat whose answers cannot be found.
WHOLE_CHAT = "set data.assistant_only_loss: false to learn whole chats"
_OTHER = "Use a chat template that writes it, or remove it."


@dataclass
class Rendered:
    """A text of ``chat``, and the spans in it that are learned."""

    chat: Chat
    text: str
    spans: list[Span]

    def join(self) -> str:
        """Return what is learned."""
        return "".join(self.text[begin:end] for begin, end in self.spans)

    def cut_out(self, hole: Span) -> None:
        """Learn nothing of ``hole``."""
        begin, end = hole
        before = [(first, min(last, begin)) for first, last in self.spans]
        after = [(max(first, end), last) for first, last in self.spans]
        self.spans = sorted((first, last) for first, last in before + after if first < last)


@dataclass(frozen=True)
class TurnFinder:
    """Renders the chat at ``place`` with a tokenizer; ``notices`` say what its template changes.

    ``strict``: whether a context that is not written as it is counts as one that is left out.
    """

    tokenizer: PreTrainedTokenizerBase
    assistant_only: bool
    place: str
    strict: bool = True
    notices: list[Notice] = field(default_factory=list)

    @classmethod
    def find(
        cls, chat: Chat, place: str, tokenizer: PreTrainedTokenizerBase, assistant_only: bool
    ) -> tuple[list[Rendered], list[Notice]]:
        """Return the texts of a chat, in the order of their answers, and what is worth knowing.

        Each form of the chat is tried until the template writes all that it says. Raises
        ``DataError`` that says what of the usual form it does not write.
        """
        errors = list[Exception]()
        for strict in (True, False):
            for form in list_forms(chat):
                finder = cls(tokenizer, assistant_only, place, strict)
                try:
                    return finder._find(form.shape(chat)), finder.notices
                except Exception as error:  # a template may raise anything
                    errors.append(error)
        raise next((each for each in errors if isinstance(each, DataError)), errors[0])

    def _find(self, chat: Chat) -> list[Rendered]:
        marked = self.assistant_only and marks_answers(chat, self.tokenizer)
        text, spans = render(chat, self.tokenizer, marked=marked)
        self._check_context(chat, text)
        whole = Rendered(chat, text, spans if marked else [(0, len(text))])
        if not self.assistant_only or (marked and self._holds_all(whole)):
            return [whole]
        found = [Rendered(chat, text, [])]
        for number in reversed(chat.list_learned()):
            turn = self._find_turn(chat, number, marked)
            if found[-1].text.startswith(turn.text):
                found[-1].spans[:0] = turn.spans
            else:
                found.append(turn)
        return [each for each in reversed(found) if each.spans] or found

    def _check_context(self, chat: Chat, text: str) -> None:
        """Refuse a chat of which the template leaves out a message or a call."""
        if chat.tools and self._renders_to(replace(chat, tools=None), text):
            self._note("rows whose tools the chat template leaves out", _OTHER)
        for number, message in enumerate(chat.messages):
            if self.assistant_only and chat.is_learned(number):
                continue  # its turn is checked
            lost = find_lost(drop_reasoning(message), text)
            if lost is None:
                continue
            others = replace(chat, messages=chat.messages[:number] + chat.messages[number + 1 :])
            what = f"message {number + 1} of role {message['role']}: the chat template leaves out"
            if self.strict or message.get("tool_calls") or self._renders_to(others, text):
                raise DataError(f"{self.place}, {what} {lost}.", _OTHER)
            self._note("rows with messages that the chat template changes", f"{what} {lost}.")

    def _renders_to(self, chat: Chat, text: str) -> bool:
        """Return whether the template makes ``text`` of the chat; it may refuse it."""
        try:
            return render(chat, self.tokenizer)[0] == text
        except Exception:
            return False

    def _note(self, what: str, remedy: str) -> None:
        self.notices.append(Notice(what, 1, self.place, remedy))

    def _holds_all(self, whole: Rendered) -> bool:
        """Return whether the spans between markers are those of all answers, with all they say."""
        messages = whole.chat.messages
        if whole.chat.learned_from or not all(each.get("weight", 1) for each in messages):
            return False
        answers = [messages[number] for number in whole.chat.list_learned()]
        shown = whole.join()
        if any(find_lost(each, shown) for each in answers):
            return False
        self._close(whole, answers[-1:], marked=True)
        return True

    def _close(self, turn: Rendered, answers: list[Any], marked: bool) -> None:
        """End a turn whose template does not: a student would not learn to stop."""
        if not answers or not is_open(answers[0], turn.join()):
            return
        end = "" if marked else str(self.tokenizer.eos_token or "")
        remedy = "It is added." if end else "A student does not learn to stop: add an end to it."
        self._note("rows with answers after which the chat template teaches no end", remedy)
        turn.text += end
        turn.spans[-1] = (turn.spans[-1][0], turn.spans[-1][1] + len(end))

    def _find_turn(self, chat: Chat, number: int, marked: bool) -> Rendered:
        """Render the chat up to answer ``number``, and find the spans of this answer."""
        before = chat.take_first(number)
        message = chat.messages[number]
        said = chat.take_first(number + 1)
        turn = Rendered(said, *render(said, self.tokenizer, marked=marked))
        if marked:
            known = render(before, self.tokenizer, marked=True)[1] if number else ()
            turn.spans = turn.spans[len(known) :]
        else:
            turn.spans = [(self._find_begin(said, turn.text), len(turn.text))]
        shown = turn.join()
        if not marked and find_lost(message, shown):
            # The prompt may hold the beginning of what the answer says, such as <think>.
            shown = turn.text[_count_equal(render(before, self.tokenizer)[0], turn.text) :]
        if lost := find_lost(message, shown):
            raise DataError(
                f"{self.place}: the chat template leaves out what message {number + 1} teaches: "
                f"{lost}. What would be learned is {shorten(turn.join())}.",
                f"{_OTHER} An answer with weight 0 is not learned.",
            )
        self._close(turn, [message], marked)
        return turn

    def _find_begin(self, said: Chat, text: str) -> int:
        """Find where the last message of ``said`` begins in ``text``: where its prompt ends."""
        number = len(said.messages) - 1
        remedy = f"Use a chat template with {{% generation %}} markers, or {WHOLE_CHAT}."
        if number == 0:
            raise DataError(
                f"{self.place} begins with a message of the assistant: there is no prompt before "
                "it.",
                remedy,
            )
        prompt, _ = render(said.take_first(number), self.tokenizer, prompt=True)
        begin = _count_equal(prompt, text)
        rest = prompt[begin:]
        if not rest:
            return begin
        if not holds(text[:begin], read_content(said.messages[number - 1])):
            raise DataError(
                f"{self.place}: the assistant's part of message {number + 1} cannot be told from "
                "its context: the chat template renders the messages before it differently in the "
                "prompt.",
                remedy,
            )
        self._note(
            "rows with answers that are rendered after another prompt than a model is asked with",
            f"A model is asked with {rest!r} at the end: give the answers their reasoning, or use "
            "a template whose prompt ends where an answer begins.",
        )
        # Where only the context differs, the turn is opened as in the prompt.
        opened = text.find(rest, begin) + len(rest)
        is_opened = rest in text[begin:] and not find_lost(said.messages[-1], text[opened:])
        return opened if is_opened else begin


def _count_equal(first: str, second: str) -> int:
    """Count the characters with which both texts begin."""
    return len(os.path.commonprefix([first, second]))  # noqa: RUF071  texts, not paths
