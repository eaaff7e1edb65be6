"""vLLM KV connector: position-free KV blocks, one per frame, loaded as the prefix of a window's prompt.

vLLM loads only a prefix of a prompt from a KV connector. So a window is laid out as ``[system | reused | refreshed, new
| question]`` with its true positions (``prompt_order``), and the reused part is loaded.

* ``transfer``: a request's loads and saves, in ``SamplingParams.extra_args["kv_transfer_params"]``
* ``connector``: vLLM's interface; ``scheduling``: scheduler side, ``worker``: worker side
* ``paged``: rotating keys to their positions and back, and access to vLLM's paged cache
* ``store``: blocks as files in shared memory, which outlive the engine core
* ``tier_writer``: copies blocks and manifests to a tier of :mod:`cluster.memory.tiers`, which outlives the host
* ``window_checkpoint``: the manifest from which another process continues a window

Blocks are files on a memory file system rather than in the tiers, because scheduler, workers and replica all access
them at memory speed, a rename publishes each one atomically, and a killed core leaves nothing to repair. Only the
replica talks to the tiers, so a slow tier delays no window.
"""
