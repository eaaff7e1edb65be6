"""The reference is transformers' own forward, and our pieces put together reproduce it."""

from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from packed_rotary import rotate
from PIL import Image
from transformers import AttentionInterface
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from cluster.lab.bench.faults.positions import SeenFrame, qwen2_5_vl
from cluster.models.base import FrameSpan, PatchBatch
from cluster.models.checkpoint import IMAGENET_MEAN, IMAGENET_STD

QUESTION = "Is anyone climbing the fence?"


def picture_frames(model, count):
    """Random RGB pictures, and the same as frames cut by plain loops (all samples of a frame are the same picture)."""
    grid = model.geometry.grid(160, 120)
    generator = torch.Generator().manual_seed(21)
    pictures = torch.randint(0, 256, (count, grid.height, grid.width, 3), dtype=torch.uint8, generator=generator)
    p, merge = grid.patch, grid.merge
    frames = []
    for picture in pictures:
        patches = []
        for group_row in range(grid.group_rows):
            for group_col in range(grid.group_cols):
                for row in range(group_row * merge, (group_row + 1) * merge):
                    for col in range(group_col * merge, (group_col + 1) * merge):
                        patch = picture[row * p : (row + 1) * p, col * p : (col + 1) * p].permute(2, 0, 1)
                        patches.append(torch.stack([patch] * grid.temporal))
        cells = torch.ones(grid.group_rows, grid.group_cols).nonzero()
        frames.append(PatchBatch(patches=torch.stack(patches), cells=cells, grid=grid))
    return grid, [Image.fromarray(picture.numpy()) for picture in pictures], frames


@torch.no_grad()
def test_qwen_reference_is_the_processor_and_model_of_the_library(qwen):
    """At the published positions: the library's own put the question elsewhere (see ``window_positions``)."""
    grid, pictures, frames = picture_frames(qwen, 3)
    pixels = Qwen2VLImageProcessorPil(do_resize=False)(images=pictures, return_tensors="pt")["pixel_values"]
    text = (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n<|vision_start|>"
        + "<|video_pad|>" * (3 * grid.tokens)
        + f"<|vision_end|>{QUESTION} Answer with yes or no only.<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = torch.tensor([qwen.tokenizer(text)["input_ids"]])
    system = ids[0].tolist().index(qwen.model.config.video_token_id)
    cells = [(row, column) for row in range(grid.group_rows) for column in range(grid.group_cols)]
    seen = [SeenFrame(Fraction(time), grid.group_rows, grid.group_cols, cells) for time in range(3)]
    positions = qwen2_5_vl(system, seen, ids.shape[1] - system - 3 * grid.tokens, 2)
    with qwen._library_attention():
        expected = qwen.model(
            input_ids=ids,
            pixel_values_videos=pixels,
            video_grid_thw=torch.tensor([[3, grid.rows, grid.cols]]),
            position_ids=torch.tensor(positions).T[:, None],
            mm_token_type_ids=(ids == qwen.model.config.video_token_id).int() * 2,
        ).logits[0, -1]
    torch.testing.assert_close(qwen.reference_logits(frames, [5.0, 6.0, 7.0], QUESTION), expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_internvl_reference_is_the_processor_and_model_of_the_library(internvl):
    grid, pictures, frames = picture_frames(internvl, 3)
    processor = GotOcr2ImageProcessorPil(
        do_resize=False, crop_to_patches=False, image_mean=list(IMAGENET_MEAN), image_std=list(IMAGENET_STD)
    )
    pixels = processor(images=pictures, return_tensors="pt")["pixel_values"]
    text = (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
        + ("<img>" + "<IMG_CONTEXT>" * grid.tokens + "</img>\n") * 3
        + f"{QUESTION} Answer with yes or no only.<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = torch.tensor([internvl.tokenizer(text)["input_ids"]])
    with internvl._library_attention():
        expected = internvl.model(input_ids=ids, pixel_values=pixels).logits[0, -1]
    torch.testing.assert_close(
        internvl.reference_logits(frames, [0.0, 0.5, 1.0], QUESTION), expected, rtol=1e-4, atol=1e-4
    )


@torch.no_grad()
def layer_loop(model, frames, times_s, question):
    """A window computed as an engine does: identity rotary for the layers, the true one inside the attention."""
    tokens = model.encode([replace(frame, time_s=time) for frame, time in zip(frames, times_s, strict=True)])
    spans = [
        FrameSpan(time_s=time - times_s[0], slot=slot, cells=t.cells, grid=t.grid)
        for slot, (t, time) in enumerate(zip(tokens, times_s, strict=True))
    ]
    system, ask = model.system_ids(), model.question_ids(question)
    window = model.window_positions(len(system), spans)
    positions = torch.cat(
        [
            torch.arange(len(system)).expand(3, -1),
            *window.frames,
            torch.arange(window.next, window.next + len(ask)).expand(3, -1),
        ],
        dim=1,
    )
    cos, sin = model.rotary(positions)

    def rotating(module, query, key, value, attention_mask, scaling, **kwargs):
        q, k = (rotate(x[0].transpose(0, 1), cos, sin).transpose(0, 1)[None] for x in (query, key))
        attended = torch.nn.functional.scaled_dot_product_attention(
            q, k, value, is_causal=True, scale=scaling, enable_gqa=True
        )
        return attended.transpose(1, 2), None

    AttentionInterface.register("test_rotating", rotating)
    embeds = torch.cat([model.embed(torch.tensor(system)), *[t.embeds for t in tokens], model.embed(torch.tensor(ask))])
    hidden, *added = embeds.split(model.text_config.hidden_size, dim=1)
    hidden = hidden[None]
    before = model.text_config._attn_implementation
    model.text_config._attn_implementation = "test_rotating"
    try:
        identity = (torch.ones_like(cos)[None], torch.zeros_like(sin)[None])
        for number, layer in enumerate(model.layers):
            hidden = layer(hidden, position_embeddings=identity, attention_mask=None)
            assert isinstance(hidden, torch.Tensor)
            hidden = hidden + added[number] if number < len(added) else hidden
        # With a foreign attention function in place the reference must still be the library's.
        reference = model.reference_logits(frames, times_s, question)
        assert model.text_config._attn_implementation == "test_rotating"
    finally:
        model.text_config._attn_implementation = before
    return model.logits(hidden[0, -1:])[0], reference


@pytest.mark.parametrize("times_s", [[0.0, 1.0, 2.0, 3.0], [10.0, 10.5, 11.0, 11.5], [0.0, 1.0, 4.5, 5.0]])
def test_our_pieces_together_equal_the_reference(model, make_frame, times_s):
    grid = model.geometry.grid(160, 120)
    ours, reference = layer_loop(model, [make_frame(grid) for _ in times_s], times_s, QUESTION)
    assert (ours - reference).abs().max() <= 1e-4 * reference.abs().max()


def test_the_answer_depends_on_frames_time_and_question(model, make_frame):
    grid = model.geometry.grid(160, 120)
    first, second = ([make_frame(grid) for _ in range(3)] for _ in range(2))
    logits = [
        model.reference_logits(first, [0.0, 1.0, 2.0], QUESTION),
        model.reference_logits(second, [0.0, 1.0, 2.0], QUESTION),
        model.reference_logits(first, [0.0, 1.0, 2.0], "Is the light on?"),
    ]
    assert logits[0].shape == (model.text_config.vocab_size,)
    assert min((logits[0] - other).std() for other in logits[1:]) > 0.05
    if model.family in ("qwen2_5_vl", "qwen3_vl"):
        assert not torch.equal(logits[0], model.reference_logits(first, [0.0, 4.0, 8.0], QUESTION))


def test_the_reference_refuses_a_pruned_frame(model, make_frame, random_keep):
    grid = model.geometry.grid(160, 120)
    with pytest.raises(ValueError, match="complete frames"):
        model.reference_logits([make_frame(grid), make_frame(grid, random_keep(grid, 0.3))], [0.0, 1.0], QUESTION)


def test_internvl_reference_refuses_disordered_times(internvl, make_frame):
    grid = internvl.geometry.grid(160, 120)
    with pytest.raises(ValueError, match="ascending"):
        internvl.reference_logits([make_frame(grid), make_frame(grid)], [1.0, 0.0], QUESTION)


@torch.no_grad()
def test_fused_norms_are_the_librarys(model):
    norms = [module for module in model.model.modules() if hasattr(module, "variance_epsilon")]
    assert norms
    for norm in norms:
        x = torch.randn(5, len(norm.weight), generator=torch.Generator().manual_seed(4)) * 3
        torch.testing.assert_close(norm(x), type(norm).forward(norm, x), rtol=0, atol=1e-6)
