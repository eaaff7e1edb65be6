"""KV from elsewhere for vLLM: position-free blocks, one per frame, that a window begins with and leaves behind.

vLLM asks a KV connector for the beginning of a prompt and for nothing else. So a window is laid out as
``[system | reused | refreshed, new | question]`` with true positions carried beside it (``order``), and what is reused
is loaded.

* ``transfer``: what a request asks for, in ``SamplingParams.extra_args["kv_transfer_params"]``
* ``connector``: vLLM's interface; ``scheduling`` its side in the scheduler, ``worker`` that in the workers
* ``rotary``, ``paged``: keys rotated to where they stand and back, and vLLM's paged memory
* ``store``: blocks as files in shared memory, which outlive the engine core; ``shared_folder``: that memory's owner
* ``courier``: blocks between that folder and a tier of :mod:`cluster.memory.tiers`, which outlives the host

Blocks lie in files of a memory file system, and not in the tiers themselves, because the scheduler's and the workers'
processes and the replica's can all reach them there at the speed of memory, a rename makes each appear whole or not at
all, and nothing is left to repair when a core is killed. The tiers lie behind, and it is the replica that talks to
them: a slow one holds up nobody's windows.
"""
