"""What policies are told, against bookkeeping by hand."""

from dataclasses import replace

import numpy as np
import pytest

from cluster.engine.window.refresh.base import refresh_context


@pytest.mark.parametrize("policy", ["none", "anchors", "random", "topk_deviation", "budget"])
def test_ages_contexts_and_losses(engine, make_camera, make_spec, policy) -> None:
    camera = make_camera(kept=0.4, empty=0.2, anchor_every=2 if policy == "topk_deviation" else 4)
    engine.admit(make_spec(refresh=policy, refresh_budget=None if policy == "none" else 0.3))
    plans, plan, committed = [], engine._plan, []
    engine._plan = lambda work: plans.append(plan(work)) or plans[-1]
    # (frame, offset) -> the window it was computed in last, and the tokens before it then
    known: dict[tuple[int, int], list[tuple[int, int]]] = {}
    stream = engine._streams["cam"]
    checked = 0
    for index in range(24):
        for request in engine.push(camera.sample(index)):
            frames = stream.window_frames(request.start, request.end)
            had_kv = [frame for frame in frames if frame.has_kv]
            context = refresh_context(stream, request.window, frames, 7, 3)
            tokens = [(f.index, o) for f in had_kv for o in range(len(f.tokens))]
            here = set(tokens)
            assert len(context) == len(tokens)
            assert (context.system, context.layers) == (7, 3)
            for place, token in enumerate(tokens):
                before = known[token]
                assert context.context[place] == len(before)
                assert context.lost[place] == len([t for t in before if t not in here])
                assert frames[context.frame[place]].index == token[0]
                assert context.offset[place] == token[1]
                assert context.anchor[place] == camera.sample(token[0]).anchor
                checked += 1
            assert context.budget == (None if policy == "none" else round(0.3 * len(tokens)))
            engine.step([request])
            layout = [(f.index, o) for f in frames for o in range(len(f.tokens))]
            through = plans[-1].computed.copy()
            if plans[-1].work.narrowing is not None:
                through = np.array([f.computed[0][o] == request.window for f in frames for o in range(len(f.tokens))])
                # Whatever went on is what the budget allows, on top of what is new.
                assert through.sum() == context.budget + plans[-1].visual - plans[-1].cached
            for place, token in enumerate(layout):
                if through[place]:
                    known[token] = layout[:place]
            committed.append(request.window)
    assert checked > 150
    assert committed == list(range(12))


def test_nothing_is_refreshed_while_kv_is_exact(engine, make_camera, make_spec, run) -> None:
    """Growing windows are exact; after a fresh start, and after a failure that lost all KV, they are so again."""
    camera = make_camera(kept=0.5, anchor_every=2)
    engine.admit(make_spec(refresh="anchors"))
    first = run(engine, [camera.sample(i) for i in range(12)])
    assert [answer.tokens.refreshed > 0 for answer in first] == [False] * 4 + [True] * 2
    again = run(engine, [replace(camera.sample(i), fresh=i == 0) for i in range(12)])
    assert [answer.tokens.refreshed > 0 for answer in again] == [False] * 4 + [True] * 2
    engine._streams["cam"].invalidate_kv()
    after = run(engine, [camera.sample(i) for i in range(12, 16)])
    assert [answer.tokens.reused > 0 for answer in after] == [False, True]
    assert [answer.tokens.refreshed > 0 for answer in after] == [False, True]
