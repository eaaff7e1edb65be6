"""vLLM behind the ``Engine`` interface: the vision tower and stream state in this process, language models in vLLM's.

Data flow of a window (modules marked * import vLLM; nothing of vLLM is patched):

1. ``engine`` implements :class:`~cluster.engine.base.Engine`; streams, windows and the static gate are shared with the
   native engine.
2. ``prompt_layout``* turns encoded frames into prompts in time order.
3. ``prompt_items``*: a prompt is ``[system | items | question]``. An item is embeddings, their positions, and a digest
   of both for vLLM's prefix cache. Items may stand in any order: positions alone place the tokens.
4. ``core``*: vLLM's ``AsyncLLM`` with a deadline, restarted when its processes died.
5. Inside vLLM's processes, ``plugin`` registers ``model``*, which gives the exact ``positions`` to vLLM's own layers.
   ``served_model`` says which language models there are, and writes the folder they are loaded from.

A prompt by hand::

    served = write_model_folder(model, folder, head_sizes)
    items = [WindowItem.of(embeds, positions, content_digest(embeds), after=next_position)]
    check_items(items, served.width, model.dtype)
    prompt = window_prompt(model.system_ids(), items, model.question_ids(text), placeholder=0)
    core = VllmCore(arguments, yes_and_no_ids, end_ids, VllmSettings())
    replies = core.answer([PromptRequest(prompt)])
"""
