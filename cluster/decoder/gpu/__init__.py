"""The decoder's front end as batched torch operations, for decoding on a GPU; also runs on torch's ``cpu`` device."""
