"""Camera memory: KV of frames that left the window, under a hard byte cap. Independent of engines and models."""
