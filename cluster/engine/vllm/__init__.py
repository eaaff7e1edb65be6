"""vLLM as an engine: our tower and bookkeeping in this process, language models in vLLM's own, nothing of it patched.

A window's way, module by module (only those marked * import vLLM):

1. ``engine`` is the :class:`~cluster.engine.base.Engine`; streams, windows and the static gate are the native
   engine's.
2. ``layout``* makes prompts of a window's encoded frames: ``TimeOrder`` in time order; ``reuse``* in an order whose
   beginning a KV connector can serve.
3. ``items``*: a prompt is ``[system | items | question]``, rendered. An item is embeddings, the position of each, and a
   key of both, which vLLM's prefix cache goes by. Items stand in any order: positions alone say where tokens are.
4. ``core``*: vLLM's ``AsyncLLM`` with a deadline, started anew when its processes died.
5. Inside vLLM's processes, ``plugin`` registers ``model``*, which gives exactly our ``positions`` to vLLM's own Qwen2.
   ``served`` writes what it is loaded from.

A prompt by hand::

    served = serve_folder(model, folder, head_sizes)
    items = [WindowItem.of(embeds, positions, content_digest(embeds), after=next_position)]
    check_items(items, served.hidden, model.dtype)
    prompt = window_prompt(model.system_ids(), items, model.question_ids(text), placeholder=0)
    replies = VllmCore(arguments, yes_and_no_ids, end_ids).answer([Ask(prompt, query=...)], timeout_s=60)
"""
