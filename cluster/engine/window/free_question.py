"""What the engines share for free questions: the prompt's tokens, the requested time, and text as it is decoded."""

from collections.abc import Sequence

from cluster.models.base import VisionLanguageModel
from cluster.types import MICROSECONDS, AskSpec


def prompt_ids(model: VisionLanguageModel, ask: AskSpec) -> list[int]:
    """Tokens after the last frame: all turns and the question, or a standing question as in a window."""
    if ask.standing:
        return model.question_ids(ask.text)
    ids: list[int] = []
    for number, (text, answer) in enumerate(ask.turns):
        ids += model.ask_ids(text, follow_up=number > 0)
        ids += model.text_ids(answer)
    return ids + model.ask_ids(ask.text, follow_up=bool(ask.turns))


def wanted_times(ask: AskSpec, newest: int) -> tuple[int, int]:
    """Start and end of the requested time, on the memory's clock; ``newest``: time of the newest frame."""
    if ask.span is not None:
        return ask.span
    if ask.since_s is None:
        return -(2**62), 2**62
    return newest - round(ask.since_s * MICROSECONDS), 2**62


class StreamedText:
    """An answer's text, decoded as its tokens come."""

    def __init__(self, model: VisionLanguageModel) -> None:
        self.tokens: list[int] = []
        self.text = ""
        self._model = model

    def add_tokens(self, tokens: Sequence[int], *, last: bool) -> str:
        """The next piece of the text; empty while a character is incomplete, unless these tokens are the last."""
        self.tokens += tokens
        whole = str(self._model.tokenizer.decode(self.tokens, skip_special_tokens=True))
        if whole.endswith("\ufffd") and not last:
            return ""
        piece, self.text = whole[len(self.text) :], whole
        return piece
