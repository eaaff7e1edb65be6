"""From logits and tokens to answers: calibrated yes/no score, answer text, end-of-answer tokens."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from cluster.errors import NotFiniteError
from cluster.models.base import VisionLanguageModel
from cluster.types.answers import YES_THRESHOLD


class YesNoScore:
    """``P(yes) = sigmoid((logsumexp(yes ids) - logsumexp(no ids)) / temperature + bias)``.

    At temperature 1 and bias 0 this is the model's own probability of *yes*, given that it answers yes or no.
    Temperature and bias are fitted on labelled windows (Platt scaling).
    """

    def __init__(
        self, yes: Sequence[int], no: Sequence[int], *, temperature: float, bias: float, device: torch.device
    ) -> None:
        self.ids = frozenset((*yes, *no))
        self.yes = torch.tensor(list(yes), device=device)
        self.no = torch.tensor(list(no), device=device)
        self.temperature = temperature
        self.bias = bias

    def __call__(self, logits: Tensor) -> Tensor:
        """Logits ``[n, vocab]`` -> scores ``[n]`` float32."""
        yes, no = (logits[:, ids].float().logsumexp(dim=1) for ids in (self.yes, self.no))
        return torch.sigmoid((yes - no) / self.temperature + self.bias)

    def decide(self, logits: Tensor, yes: float) -> int:
        """First token of an answer from its logits ``[vocab]``: the argmax, unless that is a *yes* or *no* token; then
        the likeliest token of the side that the score ``yes`` decides for."""
        token = int(logits.argmax())
        if token not in self.ids:
            return token
        ids = self.yes if yes >= YES_THRESHOLD else self.no
        return int(ids[logits[ids].argmax()])


def check_scores(scores: Sequence[float], dtype: torch.dtype) -> None:
    """Raise ``NotFiniteError`` if a score is NaN, which would count as *no* for ever."""
    if any(map(math.isnan, scores)):
        narrow = dtype == torch.float16
        cure = "set model.dtype to bfloat16" if narrow else "its weights may be damaged: sightline models check MODEL"
        raise NotFiniteError(f"the model computes NaN in {str(dtype).removeprefix('torch.')}; {cure}")


def make_score(
    model: VisionLanguageModel,
    yes: Sequence[int],
    no: Sequence[int],
    device: torch.device,
    temperature: float | None = None,
    bias: float | None = None,
    *,
    free: bool = False,
) -> YesNoScore:
    """Create the score with this calibration; ``None``: the model's own, else 1 and 0. ``free``: calibration for
    answers to free questions."""
    own = model.settings
    if temperature is None:
        temperature = (own.answer_temperature if free else own.score_temperature) or 1.0
    if bias is None:
        bias = (own.answer_bias if free else own.score_bias) or 0.0
    return YesNoScore(yes, no, temperature=temperature, bias=bias, device=device)


def why_ids(model: VisionLanguageModel) -> list[int]:
    """Token ids of the follow-up turn that asks to explain a yes or no: an instruction-tuned model told to answer with
    one word stops after it."""
    return model.ask_ids("Why? Say in one sentence what the video shows.", follow_up=True)


def answer_text(model: VisionLanguageModel, tokens: Sequence[int]) -> str:
    """Decode an answer's tokens to text."""
    return str(model.tokenizer.decode(list(tokens), skip_special_tokens=True)).strip()


def end_token_ids(model: VisionLanguageModel) -> frozenset[int]:
    """Ids of the tokens that end an answer, from the tokenizer and the checkpoint's generation config."""
    settings = getattr(model.model, "generation_config", None)
    found: set[int] = set()
    for source in (model.tokenizer, settings):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            found |= set(ids if isinstance(ids, list) else [ids])
    return frozenset(found)
