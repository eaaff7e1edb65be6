"""vLLM behind the ``Engine`` interface: vision tower and stream state in this process, the language model in vLLM's.

Data flow of a window (modules marked * import vLLM; vLLM itself is not patched):

1. ``engine`` implements :class:`~cluster.engine.base.Engine`; streams, windows and the static gate are shared with the
   native engine.
2. ``prompt_layout``* turns encoded frames into prompts in time order.
3. ``prompt_items``*: a prompt is ``[system | items | question]``. An item consists of embeddings, their positions, and
   a digest of both for vLLM's prefix cache. Items may come in any order: only positions place the tokens.
4. ``core``*: vLLM's ``AsyncLLM`` with a deadline, restarted after its processes have died.
5. In vLLM's processes, ``plugin`` registers ``model``*, which passes exact ``positions`` to vLLM's own layers.
   ``served_model`` lists the supported language models and writes the folder they are loaded from.

Building a prompt by hand::

    served = write_model_folder(model, folder, head_sizes)
    items = [WindowItem.of(embeds, positions, content_digest(embeds), after=next_position)]
    check_items(items, served.width, model.dtype)
    prompt = window_prompt(model.system_ids(), items, model.question_ids(text))
    core = VllmCore(arguments, yes_and_no_ids, end_ids, VllmSettings())
    replies = core.answer([PromptRequest(prompt)])
"""
