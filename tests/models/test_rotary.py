"""Rotating raw keys gives the model's own keys."""

import torch
from packed_rotary import rotate
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward


@torch.no_grad()
def test_rotated_raw_keys_are_the_models_own(model):
    keys, raw = [], []

    def recording(module, query, key, value, attention_mask, **kwargs):
        keys.append(key[0].transpose(0, 1))
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)

    AttentionInterface.register("test_recording", recording)
    text = model.model.model.language_model
    hooks = [
        getattr(layer.self_attn, "k_norm", layer.self_attn.k_proj).register_forward_hook(
            lambda _m, _i, out: raw.append(out[0])
        )
        for layer in model.layers
    ]
    generator = torch.Generator().manual_seed(3)
    n = 40
    positions = torch.randint(0, 3000, (3, n), generator=generator)
    three_axes = "qwen" in model.family
    if not three_axes:
        positions[1:] = positions[:1]
    embeds = torch.randn(1, n, model.text_config.hidden_size, generator=generator)
    before = text.config._attn_implementation
    text.config._attn_implementation = "test_recording"
    try:
        text(inputs_embeds=embeds, position_ids=positions[:, None] if three_axes else positions[:1])
    finally:
        text.config._attn_implementation = before
        for hook in hooks:
            hook.remove()
    cos, sin = model.rotary(positions)
    assert cos.shape == sin.shape == (n, keys[0].shape[-1])
    assert cos.dtype == torch.float32
    assert len(keys) == len(raw) == len(model.layers)
    for own, key in zip(keys, raw, strict=True):
        # The library's angles are float32, wrong by 3000 * 2^-24 there; ours are not.
        torch.testing.assert_close(rotate(key.view(own.shape), cos, sin), own, rtol=0, atol=3e-3)


def test_rotation_is_relative(model):
    """Scores depend on the distance of positions alone: what makes KV without positions possible."""
    generator = torch.Generator().manual_seed(4)
    config = model.text_config
    shape = (6, config.num_attention_heads, config.hidden_size // config.num_attention_heads)
    q, k = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
    positions = torch.randint(0, 50, (3, 6), generator=generator)

    def scores(offset):
        cos, sin = model.rotary(positions + offset)
        return torch.einsum("ihd,jhd->hij", rotate(q, cos, sin), rotate(k, cos, sin))

    torch.testing.assert_close(scores(0), scores(137), rtol=1e-4, atol=1e-3)
