"""Camera memory: KV of frames that left the window, under a hard byte cap. Depends on no engine and no model."""
