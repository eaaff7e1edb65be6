"""Where questions are taught to look, on hand-made scores."""

import math

import pytest
import torch

from cluster.lab.training.examples import Example
from cluster.lab.training.loss import DenseHeads, PointingTargets, pointing_loss, window_loss
from cluster.lab.training.sequence_layout import Block
from cluster.lab.training.trainable_model import probe_attention

# Rows: one of the system prompt, three visual ones, of which the second shows the event.
WINDOW = torch.tensor([[False, True, True, True]])
EVENT = torch.tensor([[False, False, True, False]])
SYSTEM = torch.tensor([[True, False, False, False]])


def looks(scores: list[float]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """One layer with one head whose scores of the rows are these."""
    return [(torch.ones(1, 1, 1), torch.tensor(scores).view(1, -1, 1))]


def targets(truth: bool, event: torch.Tensor = EVENT) -> PointingTargets:
    return PointingTargets(WINDOW, event, SYSTEM, torch.tensor([truth]))


@pytest.mark.parametrize(("truth", "row"), [(True, 2), (False, 0)])
def test_the_loss_is_the_logarithm_of_the_attention_on_the_right_row(truth: bool, row: int) -> None:
    scores = [0.3, -1.0, 2.0, 0.5]
    share = math.exp(scores[row]) / sum(map(math.exp, scores))
    loss = pointing_loss(looks(scores), targets(truth), torch.ones(1))
    assert float(loss) == pytest.approx(-math.log(share))


def test_rows_outside_of_the_window_do_not_count() -> None:
    scores = [0.3, -1.0, 2.0, 0.5]
    narrow = PointingTargets(WINDOW & torch.tensor([[True, True, True, False]]), EVENT, SYSTEM, torch.tensor([True]))
    share = math.exp(2.0) / (math.exp(0.3) + math.exp(-1.0) + math.exp(2.0))
    assert float(pointing_loss(looks(scores), narrow, torch.ones(1))) == pytest.approx(-math.log(share))


def test_an_event_that_was_pruned_away_teaches_nothing() -> None:
    assert float(pointing_loss(looks([0.0, 1.0, 2.0, 3.0]), targets(True, event=EVENT & ~EVENT), torch.ones(1))) == 0.0


def test_a_step_moves_attention_to_the_event(trainable, grid, examples: list[Example]) -> None:
    heads = DenseHeads(trainable.text_config.hidden_size)
    example = next(e for e in examples if any(p.answer == "yes" and p.kind != "memory" for p in e.questions))
    optimizer = torch.optim.AdamW(trainable.model.parameters(), lr=2e-3)
    pointed = []
    for _ in range(6):
        loss = window_loss(trainable, heads, [example], grid)
        pointed.append(loss.parts["pointed"])
        optimizer.zero_grad()
        loss.total.backward()
        optimizer.step()
    assert pointed[-1] < 0.9 * pointed[0]


def test_queries_and_keys_are_those_of_the_layer(trainable) -> None:
    """With them and the values, the layer's own output is computed again."""
    layer, rows = trainable.layers[0], 7
    torch.manual_seed(0)
    hidden = torch.randn(rows, trainable.text_config.hidden_size)
    cos, sin = trainable.rotary(torch.arange(rows).expand(3, -1))
    sees = torch.ones(rows, rows).tril() > 0
    block = Block(0, rows, ((0, rows),), torch.zeros(rows, rows).masked_fill(~sees, float("-inf")))
    asking = torch.tensor([3, 6])
    query, key = probe_attention(hidden, layer, cos, sin, asking)
    value = layer.self_attn.v_proj(layer.input_layernorm(hidden)).view(rows, len(key), -1).transpose(0, 1)
    groups = query.shape[0] // key.shape[0]
    scores = torch.bmm(query, key.repeat_interleave(groups, 0).mT).masked_fill(~sees[asking], float("-inf"))
    attended = torch.bmm(scores.softmax(-1), value.repeat_interleave(groups, 0)).transpose(0, 1).flatten(1)
    after = hidden[asking] + layer.self_attn.o_proj(attended)
    after = after + layer.mlp(layer.post_attention_layernorm(after))
    whole = layer(hidden[None], position_embeddings=(cos[None], sin[None]), blocks=[block])[0]
    torch.testing.assert_close(after, whole[asking], atol=1e-4, rtol=1e-4)
