"""What is shown and kept of a camera: its newest picture, and snapshots and clips of incidents."""
