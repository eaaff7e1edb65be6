"""The pruned towers against transformers' own tower, whole and with pruned patches hidden from it."""

import itertools
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from overlapping_patches import same_where_shown_twice
from transformers.models.internvl.modeling_internvl import eager_attention_forward
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import apply_rotary_pos_emb_vision
from transformers.vision_utils import get_vision_interpolation_indices_and_weights

from cluster.models.base import PatchBatch, VisionLanguageModel
from cluster.models.checkpoint import PATCHES_PER_PASS
from cluster.models.llava import Llava
from cluster.models.loading import load_model
from cluster.models.presets import PRESETS
from cluster.types import PatchGrid


def assert_close(actual, expected, relative=1e-4):
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= relative * expected.abs().max()


def visual_tokens(tokens):
    return tokens.embeds[tokens.cells[:, 0] >= 0]


def hidden_groups(frame: PatchBatch, filler: torch.Tensor) -> torch.Tensor:
    """The complete frame ``[rows * cols, T, C, p, p]`` behind a pruned one, filler where nothing was kept."""
    unit = frame.grid.merge**2
    whole = filler.clone().unflatten(0, (-1, unit))
    whole[frame.cells[:, 0] * frame.grid.group_cols + frame.cells[:, 1]] = frame.patches.unflatten(0, (-1, unit))
    return whole.flatten(0, 1)


@pytest.fixture
def grid(model: VisionLanguageModel) -> PatchGrid:
    # Qwen: 3x4 groups, so that the windows at the bottom are cut off.
    return model.geometry.grid(160, 120)


def library_tower(model: VisionLanguageModel, frames: list[PatchBatch]) -> torch.Tensor:
    with model._library_attention(), torch.no_grad():
        if isinstance(model, Llava):
            pooled = model.model.model.get_video_features(**model._pixels(frames), return_dict=True).pooler_output
            # OneVision's newline behind the frames is not of the tower.
            return torch.cat(list(pooled)).flatten(0, -2)[: len(frames) * frames[0].grid.tokens]
        if model.family == "internvl":
            pixels = torch.stack([model._picture(frame) for frame in frames])
            return model.model.get_image_features(pixels, return_dict=True).pooler_output.flatten(0, 1)
        grid = frames[0].grid
        pixels = model._pixel_values(torch.cat([frame.patches for frame in frames]))
        seen = model.model.model.visual(pixels, grid_thw=torch.tensor([[len(frames), grid.rows, grid.cols]]))
        return torch.cat([seen.pooler_output, *getattr(seen, "deepstack_features", [])], dim=1)


def test_a_complete_window_equals_the_library(model, grid, make_frame):
    frames = [make_frame(grid) for _ in range(3)]
    ours = torch.cat([visual_tokens(tokens) for tokens in model.encode(frames)])
    assert_close(ours, library_tower(model, frames))


def test_mergers_belong_to_blocks_in_the_order_of_the_configuration(make_frame):
    """They were taken in the order of the blocks."""
    model = load_model("tiny-qwen3_vl")
    visual = model.model.model.visual
    visual.deepstack_visual_indexes = visual.config.deepstack_visual_indexes = [1, 0]
    frames = [make_frame(model.geometry.grid(160, 120))]
    assert_close(visual_tokens(model.encode(frames)[0]), library_tower(model, frames))


def qwen_dense(model: VisionLanguageModel, grid: PatchGrid, keep: torch.Tensor, patches: torch.Tensor) -> torch.Tensor:
    """Transformers' blocks over the complete frame, one dense mask per kind of layer, pruned patches masked as keys."""
    visual, merge = model.model.model.visual, grid.merge
    # A tower without windows sees the whole frame in every layer.
    side = getattr(visual, "window_size", grid.width + grid.height) // visual.patch_embed.patch_size
    places = [
        (group_row * merge + row, group_col * merge + col)
        for group_row, group_col, row, col in itertools.product(
            range(grid.group_rows), range(grid.group_cols), range(merge), range(merge)
        )
    ]
    n = len(places)
    windowed, full = torch.full((n, n), -torch.inf), torch.full((n, n), -torch.inf)
    for (i, a), (j, b) in itertools.product(enumerate(places), repeat=2):
        if i == j or keep[b[0] // merge, b[1] // merge]:
            full[i, j] = 0.0
            if (a[0] // side, a[1] // side) == (b[0] // side, b[1] // side):
                windowed[i, j] = 0.0
    hidden = visual.patch_embed(model._pixel_values(patches))
    if hasattr(visual, "pos_embed"):
        taps, weights = get_vision_interpolation_indices_and_weights(
            torch.tensor([[1, grid.rows, grid.cols]]), visual.num_grid_per_side, align_corners=True
        )
        raster = torch.tensor([row * grid.cols + col for row, col in places])
        hidden = hidden + (visual.pos_embed(taps[raster]) * weights[raster][:, :, None]).sum(1)
    added = []
    cos, sin = visual.rotary_pos_emb(hidden, torch.tensor(places))
    for index, block in enumerate(visual.blocks):
        attention = block.attn
        mask = full if index in getattr(visual, "fullatt_block_indexes", range(len(visual.blocks))) else windowed
        qkv = attention.qkv(block.norm1(hidden)).reshape(n, 3, attention.num_heads, attention.head_dim)
        q, k = apply_rotary_pos_emb_vision(qkv[:, 0], qkv[:, 1], cos, sin)
        scores = torch.einsum("ihd,jhd->hij", q, k) * attention.head_dim**-0.5 + mask
        attended = torch.einsum("hij,jhd->ihd", scores.softmax(-1), qkv[:, 2]).reshape(n, -1)
        hidden = hidden + attention.proj(attended)
        hidden = hidden + block.mlp(block.norm2(hidden))
        if index in getattr(visual, "deepstack_visual_indexes", ()):
            added.append(visual.deepstack_merger_list[visual.deepstack_visual_indexes.index(index)](hidden))
    return torch.cat([visual.merger(hidden), *added], dim=1)


def internvl_dense(
    model: VisionLanguageModel, grid: PatchGrid, keep: torch.Tensor, patches: torch.Tensor
) -> torch.Tensor:
    """Transformers' embedding, eager attention with pruned patches masked as keys, and whole-frame pixel shuffle."""
    tower, core = model.model.model.vision_tower, model.model.model
    kept = [bool(keep[row // grid.merge, col // grid.merge]) for row in range(grid.rows) for col in range(grid.cols)]
    visible = torch.tensor([True, *kept])
    mask = torch.where(visible[None, :] | torch.eye(len(visible), dtype=torch.bool), 0.0, -torch.inf)[None, None]
    frame = PatchBatch(patches=patches, cells=torch.ones_like(keep).nonzero(), grid=grid)
    hidden = tower.embeddings(model._picture(frame)[None])
    for layer in tower.encoder.layer:
        attention, normed = layer.attention, layer.layernorm_before(hidden)
        q, k, v = (
            norm(project(normed)).unflatten(-1, (attention.num_heads, -1)).transpose(1, 2)
            for norm, project in (
                (attention.q_norm, attention.q_proj),
                (attention.k_norm, attention.k_proj),
                (torch.nn.Identity(), attention.v_proj),
            )
        )
        attended = eager_attention_forward(attention, q, k, v, mask, scaling=attention.scale)[0]
        hidden = hidden + layer.lambda_1 * attention.projection_layer(attended.flatten(2))
        hidden = hidden + layer.lambda_2 * layer.mlp(layer.layernorm_after(hidden))
    square = hidden[:, 1:].reshape(1, grid.rows, grid.cols, -1)
    shuffled = core.pixel_shuffle(square, scale_factor=core.config.downsample_ratio)
    return core.multi_modal_projector(shuffled.reshape(grid.tokens, -1))


def llava_dense(model: VisionLanguageModel, grid: PatchGrid, keep: torch.Tensor, patches: torch.Tensor) -> torch.Tensor:
    """Transformers' embedding and pooling of the whole frame, eager attention with pruned patches masked as keys."""
    core, config = model.model.model, model.model.config
    tower, side = core.vision_tower, grid.rows - grid.overlap
    visible = torch.zeros(side, side, dtype=torch.bool)
    for row, col in keep.nonzero().tolist():
        # A token needs the patches around its middle.
        top, left = (math.floor((place + 0.5) * side / grid.group_rows - 0.5) for place in (row, col))
        visible[top : top + 2, left : left + 2] = True
    seen = visible.flatten()
    first = hasattr(tower.embeddings, "class_embedding")
    if first:
        seen = torch.cat([torch.ones(1, dtype=torch.bool), seen])
    mask = torch.where(seen[None, :] | torch.eye(len(seen), dtype=torch.bool), 0.0, -torch.inf)
    frame = PatchBatch(patches=patches, cells=torch.ones_like(keep).nonzero(), grid=grid)
    hidden = tower.embeddings(model._picture(frame)[None])
    if first:
        hidden = tower.pre_layrnorm(hidden)
    layers = len(tower.encoder.layers)
    for layer in tower.encoder.layers[: layers + 1 + config.vision_feature_layer]:
        attention, normed = layer.self_attn, layer.layer_norm1(hidden)
        q, k, v = (
            project(normed).unflatten(-1, (attention.num_heads, -1)).transpose(1, 2)
            for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        attended = ((q @ k.transpose(2, 3)) * attention.scale + mask).softmax(-1) @ v
        hidden = hidden + attention.out_proj(attended.transpose(1, 2).flatten(2))
        hidden = hidden + layer.mlp(layer.layer_norm2(hidden))
    if first:
        return core.multi_modal_projector(core.vision_resampler(hidden[:, 1:]))[0]
    square = core.multi_modal_projector(hidden).reshape(1, side, side, -1).permute(0, 3, 1, 2)
    half = [math.ceil(side / 2)] * 2
    return torch.nn.functional.interpolate(square, size=half, mode="bilinear")[0].flatten(1).T


@pytest.mark.parametrize("share", [0.1, 0.4, 0.8])
@torch.no_grad()
def test_pruned_equals_the_library_with_pruned_patches_hidden(model, grid, make_frame, random_keep, share):
    keep = random_keep(grid, share)
    frame = make_frame(grid, keep)
    dense = internvl_dense if model.family == "internvl" else llava_dense if isinstance(model, Llava) else qwen_dense
    patches = hidden_groups(frame, filler=make_frame(grid).patches)
    if grid.overlap:
        # What a kept group shows of the middle is what the picture has there.
        order = torch.cat([frame.cells, (~keep).nonzero()])
        index = order[:, 0] * grid.group_cols + order[:, 1]
        first = same_where_shown_twice(patches.unflatten(0, (-1, 4))[index].flatten(0, 1), order, grid)
        patches = first.unflatten(0, (-1, 4))[index.argsort()].flatten(0, 1)
    expected = dense(model, grid, keep, patches)
    assert_close(visual_tokens(model.encode([frame])[0]), expected[keep.flatten()])


def test_pruning_changes_what_is_left(model, grid, make_frame, random_keep):
    """Else the comparison above would hold for a tower that ignores context."""
    keep = random_keep(grid, 0.3)
    whole = make_frame(grid)
    part = PatchBatch(
        patches=whole.patches.unflatten(0, (-1, grid.merge**2))[keep.flatten()].flatten(0, 1),
        cells=keep.nonzero(),
        grid=grid,
    )
    full, pruned = (visual_tokens(tokens) for tokens in model.encode([whole, part]))
    assert (full[keep.flatten()] - pruned).abs().max() > 1e-2


_tiny = {name: load_model(name) for name in PRESETS if name.startswith("tiny-")}


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), name=st.sampled_from(sorted(_tiny)))
def test_packing_and_order_change_nothing(data, name):
    """Frames of several cameras and shapes packed together, in any order, equal each frame alone."""
    model = _tiny[name]
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    frames = []
    for width, height in data.draw(st.lists(st.sampled_from([(160, 120), (90, 160), (112, 112)]), max_size=4)):
        grid = model.geometry.grid(width, height)
        share = data.draw(st.sampled_from([0.0, 0.2, 0.6, 1.0]))
        cells = (torch.rand(grid.group_rows, grid.group_cols, generator=generator) < share).nonzero()
        shape = (len(cells) * grid.merge**2, grid.temporal, 3, grid.patch, grid.patch)
        patches = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        frames.append(PatchBatch(patches=patches, cells=cells, grid=grid))
    order = data.draw(st.permutations(range(len(frames))))
    packed = model.encode([frames[i] for i in order])
    assert len(packed) == len(frames)
    for tokens, i in zip(packed, order, strict=True):
        (alone,) = model.encode([frames[i]])
        assert torch.equal(tokens.cells, alone.cells)
        assert len(visual_tokens(tokens)) == len(frames[i].cells)
        torch.testing.assert_close(tokens.embeds, alone.embeds, rtol=1e-4, atol=1e-5)


def test_a_long_batch_runs_in_bounded_passes(model, grid, make_frame, random_keep, monkeypatch):
    frames = [make_frame(grid, random_keep(grid, share)) for share in (0.5, 1.0, 0.1, 0.7, 0.3)]
    whole = model.encode(frames)
    passes = []
    encode_kept = type(model)._encode_kept
    monkeypatch.setattr(
        type(model),
        "_encode_kept",
        lambda self, part: passes.append(sum(len(f.patches) for f in part)) or encode_kept(self, part),
    )
    monkeypatch.setitem(PATCHES_PER_PASS, "cpu", 60)
    for ours, expected in zip(model.encode(frames), whole, strict=True):
        torch.testing.assert_close(ours.embeds, expected.embeds, rtol=1e-4, atol=1e-5)
    assert len(passes) > 1
    assert sum(passes) == sum(len(frame.patches) for frame in frames)
    # A single frame may exceed the limit: frames are never split.
    assert all(size <= max(60, grid.rows * grid.cols) for size in passes)


def test_a_frame_without_patches_has_no_token(model, grid, make_frame):
    nothing = torch.zeros(grid.group_rows, grid.group_cols, dtype=torch.bool)
    before, empty, after = model.encode([make_frame(grid), make_frame(grid, nothing), make_frame(grid)])
    assert len(empty) == 0
    assert empty.embeds.shape == (0, model.text_config.hidden_size * (1 + model.deepstack))
    assert len(before) == len(after) > 0
    assert [len(tokens) for tokens in model.encode([make_frame(grid, nothing)])] == [0]
    assert model.encode([]) == []


def test_a_frame_s_tokens_keep_no_other_frame_s_alive(model, grid, make_frame):
    for tokens in model.encode([make_frame(grid) for _ in range(3)]):
        assert tokens.embeds.untyped_storage().nbytes() == tokens.embeds.nbytes


def test_internvl_wraps_each_frame_in_its_own_text(internvl, make_frame, random_keep):
    grid = internvl.geometry.grid(640, 360)
    (tokens,) = internvl.encode([make_frame(grid, random_keep(grid, 0.5))])
    text = tokens.cells[:, 0] < 0
    wrap = internvl.tokenizer("<img></img>\n")["input_ids"]
    assert tokens.cells[text, 1].tolist() == list(range(len(wrap)))
    assert torch.equal(tokens.embeds[text], internvl.embed(torch.tensor(wrap)))
    assert text.nonzero().flatten().tolist() == [0, len(tokens) - 2, len(tokens) - 1]


@pytest.mark.parametrize("layer", [-2, 1])
def test_internvl_features_of_an_earlier_layer(make_frame, layer):
    model = load_model("tiny-internvl3", seed=5)
    model.model.config.vision_feature_layer = layer
    frames = [make_frame(model.geometry.grid(64, 64)) for _ in range(2)]
    with model._library_attention(), torch.no_grad():
        expected = model.model.model.get_image_features(
            torch.stack([model._picture(frame) for frame in frames]),
            vision_feature_layer=layer,
            vision_feature_select_strategy="default",
        ).pooler_output
    ours = torch.cat([visual_tokens(tokens) for tokens in model.encode(frames)])
    assert_close(ours, expected.flatten(0, 1))
