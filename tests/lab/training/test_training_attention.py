"""The attention of a training forward against dense attention; the tower in training against the served one."""

import pytest
import torch
from torch import Tensor

from cluster.lab.training.examples import Example
from cluster.lab.training.loss import example_layout
from cluster.lab.training.trainable_model import TrainableModel, blocked_attention, patch_batches
from cluster.types import PatchGrid


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.double, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def test_blocks_are_dense_attention_under_their_mask(
    trainable: TrainableModel, examples: list[Example], grid: PatchGrid
) -> None:
    layout = example_layout(trainable, examples[2], grid, with_answers=True)
    rows = len(layout)
    q, k, v = random(4, rows, 8, seed=1), random(2, rows, 8, seed=2), random(2, rows, 8, seed=3)
    mask = torch.full((rows, rows), float("-inf"), dtype=torch.double)
    for block in layout.blocks:
        columns = torch.cat([torch.arange(a, b) for a, b in block.keys])
        mask[block.start : block.stop, columns] = block.bias.double()
    repeated = (x.repeat_interleave(2, dim=0) for x in (k, v))
    dense = _dense(q, *repeated, mask)
    blocked = blocked_attention(q, k, v, layout.blocks, 1.0)
    assert torch.allclose(blocked, dense, atol=1e-12)
    weights = random(*dense.shape, seed=4)
    wanted = torch.autograd.grad((dense * weights).sum(), (q, k, v))
    got = torch.autograd.grad((blocked * weights).sum(), (q, k, v))
    for mine, right in zip(got, wanted, strict=True):
        assert torch.allclose(mine, right, atol=1e-12)


def _dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT + mask, dim=-1) @ v


def test_the_tower_in_training_is_the_served_one(
    trainable: TrainableModel, examples: list[Example], grid: PatchGrid
) -> None:
    for example in examples[:3]:
        frames = patch_batches(example, grid)
        served = torch.cat([tokens.embeds for tokens in trainable.encode(frames)])
        with torch.no_grad():
            assert torch.allclose(trainable.encode_frames(frames), served, atol=2e-5)
            trainable.compute = torch.bfloat16
            assert (trainable.encode_frames(frames) - served).abs().mean() < 0.03 * served.abs().mean()
            trainable.compute = torch.float32


def test_every_weight_of_the_model_gets_a_gradient(
    trainable: TrainableModel, examples: list[Example], grid: PatchGrid
) -> None:
    layout = example_layout(trainable, examples[0], grid, with_answers=True)
    seen = trainable.encode_frames(patch_batches(examples[0], grid))
    reading = trainable.forward_sequences([seen], [layout])
    trainable.answer_logits(reading.last).square().mean().backward()
    missing = [name for name, p in trainable.model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    # A key's bias moves all scores of a query alike: its gradient is zero but for rounding.
    assert [name for name in missing if "k_proj.bias" not in name] == []


def test_gradients_are_those_of_differences(
    trainable: TrainableModel, examples: list[Example], grid: PatchGrid
) -> None:
    """Through norms, rotary, both attentions and the merger at once: a step along the gradient changes the loss by
    its square."""
    layout = example_layout(trainable, examples[1], grid, with_answers=True)
    frames = patch_batches(examples[1], grid)

    def loss() -> Tensor:
        reading = trainable.forward_sequences([trainable.encode_frames(frames)], [layout])
        return trainable.answer_logits(reading.last[layout.starts[0] :]).log_softmax(1)[:, :50].mean()

    value = loss()
    value.backward()
    parameters = [p for p in trainable.model.parameters() if p.grad is not None]
    square = sum(float(p.grad.square().sum()) for p in parameters)
    step = 1e-3 * abs(float(value.detach())) / square
    with torch.no_grad():
        for p in parameters:
            p.add_(p.grad, alpha=step)
        ahead = float(loss())
        for p in parameters:
            p.sub_(p.grad, alpha=2 * step)
        behind = float(loss())
    assert (ahead - behind) / (2 * step) == pytest.approx(square, rel=0.03)
